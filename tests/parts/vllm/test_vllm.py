"""The adapter against a server without a model, here always; and against vLLM itself where its environment is.

`make vllm` builds that environment and runs this file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch

from llamarl.config import ConfigError
from llamarl.models.hf import save_model
from llamarl.models.transformer import Transformer
from llamarl.parts.vllm.engine import VllmEngine
from llamarl.parts.vllm.plugin import WorkerExtension
from llamarl.parts.vllm.server import VllmFailed, VllmServer, VllmSettings, visible_devices
from llamarl.types import FinishReason, GenerationRequest, SamplingParams
from llamarl.weight_sync.base import Publisher, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import publisher_class
from tests.generation import conformance
from tests.nightly import nightly

ROOT = Path(__file__).parents[3]
FAKE = Path(__file__).with_name("fake_vllm.py")
PYTHON = os.environ.get("LLAMARL_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
RACING = ("check_update_in_flight", "check_abort_gives_partials_that_can_be_resumed")
ADDRESS = Address(transport="file", publisher="", num_writers=1, places={})
needs_vllm = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK), reason=f"no vLLM at {PYTHON}; `make vllm` builds it, or set LLAMARL_VLLM_PYTHON"
)


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {seconds} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    save_model(conformance.conformance_model(), path, None)
    return path


def settings(**options: object) -> VllmSettings:
    return VllmSettings(python=sys.executable, **options)


@contextmanager
def fake_engine(folder: Path, **options: object) -> Iterator[VllmEngine]:
    server = VllmServer(folder, settings(start_timeout_s=240), [sys.executable, str(FAKE)])
    engine = VllmEngine(folder, settings(**options), server=server)
    try:
        yield engine
    finally:
        engine.close()


def request(group_id: int = 1, prompt: tuple[int, ...] = (1, 2), group_size: int = 1, **options) -> GenerationRequest:
    sampling = SamplingParams(**({"max_new_tokens": 10} | options.pop("sampling", {})))
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=np.array(prompt, np.int32), group_size=group_size, sampling=sampling,
        **options,
    )  # fmt: skip


def continuation(prompt: tuple[int, ...], count: int) -> list[int]:
    fed = list(prompt)
    for _ in range(count):
        fed.append(sum(fed) % 96)
    return fed[len(prompt) :]


def test_ids_without_a_token_have_no_probability_there(folder: Path, tmp_path: Path) -> None:
    """The engine tells vLLM's workers which these are, and these remove them from all logits."""
    posted = list[tuple[str, object]]()
    server = SimpleNamespace(post=lambda path, body=None: posted.append((path, body)), close=lambda: None)
    shutil.copytree(folder, tmp_path / "padded")
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}}}
    (tmp_path / "padded" / "tokenizer.json").write_text(json.dumps(vocabulary))
    for path, expected in ((folder, []), (tmp_path / "padded", ["remove_ids"])):
        posted.clear()
        VllmEngine(path, settings(), server=server).close()
        bodies = [body for where, body in posted if where == "/collective_rpc"]
        assert [body["method"] for body in bodies] == expected
    model = SimpleNamespace(compute_logits=lambda hidden: torch.zeros(2, 96) if hidden else None)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.remove_ids(*bodies[0]["args"])
    assert model.compute_logits(True).softmax(-1)[1].nonzero()[:, 0].tolist() == [0, 2]
    assert model.compute_logits(False) is None


def test_rollouts_carry_what_the_server_says(folder: Path) -> None:
    stop = continuation((1, 2), 5)[-1]
    with fake_engine(folder) as engine:
        rollouts = conformance.run(
            engine,
            [
                request(1, group_size=3),
                request(2, sampling={"stop_token_ids": (stop,)}),
                request(3, prompt=(95,)),  # whose first token has no finite log-probability
                request(4, prompt=(90, 1)),
            ],
        )
        assert engine.stats().decode_tokens >= 30
    for index in range(3):
        rollout = rollouts[1, index]
        assert rollout.token_ids_T.tolist() == continuation((1, 2), 10)
        np.testing.assert_allclose(rollout.behavior_logprobs_T, -rollout.token_ids_T / 100, rtol=1e-6)
        assert rollout.policy_versions_T.tolist() == [0] * 10
        assert rollout.finish_reason == FinishReason.LENGTH
    assert rollouts[2, 0].finish_reason == FinishReason.STOP
    assert rollouts[2, 0].token_ids_T[-1] == stop
    assert (rollouts[3, 0].finish_reason, rollouts[3, 0].error) == (FinishReason.FAILED, "non-finite logits")
    assert rollouts[4, 0].finish_reason == FinishReason.FAILED and "no such prompt" in rollouts[4, 0].error


def test_versions_segments_and_scores(folder: Path) -> None:
    with fake_engine(folder) as engine:
        first = conformance.run(engine, [request(segment_tokens=4)])[1, 0]
        assert (first.finish_reason, first.num_tokens) == (FinishReason.PARKED, 4)
        engine.submit([request(partials=(first,), sampling={"max_new_tokens": 200})])
        assert not engine.step()
        subscriber = engine.subscribe(ADDRESS, engine.specs(), 0)
        with pytest.raises(RuntimeError, match="superseded"):
            subscriber.fetch(66, ADDRESS)
        assert subscriber.fetch(7, ADDRESS) == {}
        engine.set_version(7)
        whole = conformance.by_key(conformance.drain(engine))[1, 0]
        assert whole.token_ids_T.tolist() == continuation((1, 2), 200)
        assert whole.finish_reason == FinishReason.LENGTH
        versions = whole.policy_versions_T.tolist()
        assert versions[:4] == [0] * 4 and versions[-1] == 7 and versions == sorted(versions)
        np.testing.assert_allclose(engine.score([np.array([5, 6, 7]), np.array([1])])[0], [-0.06, -0.07], rtol=1e-6)
        with pytest.raises(ValueError, match="token id 96"):
            engine.score([np.array([96])])


def test_abort_returns_what_was_sent_and_what_was_not(folder: Path) -> None:
    long = {"max_new_tokens": 500}
    with fake_engine(folder, max_running=2) as engine:
        engine.submit([request(1, group_size=3, sampling=long), request(2, group_size=3, sampling=long)])
        engine.step()  # four are sent
        wait_for(lambda: engine.stats().decode_tokens > 20)
        aborted = engine.abort([1, 5])
        assert sorted(one.index for one in aborted) == [0, 1, 2]
        assert {one.finish_reason for one in aborted} == {FinishReason.ABORTED}
        rest = conformance.by_key(engine.abort([2]))
        assert [rest[2, index].num_tokens > 0 for index in range(3)] == [True, False, False]
        assert not engine.has_work
        resumed = conformance.run(engine, [request(2, group_size=3, partials=tuple(rest.values()))])
    assert all(one.token_ids_T.tolist() == continuation((1, 2), 10) for one in resumed.values() if one.num_tokens == 10)


def test_a_server_that_dies_is_named_and_its_log_shown(folder: Path) -> None:
    with pytest.raises(VllmFailed, match=r"vLLM server of .*model has ended(.|\n)*cannot find a device"):
        VllmServer(folder, settings(), [sys.executable, str(FAKE), "die"])
    with pytest.raises(VllmFailed, match="did not answer within 1 s"):
        VllmServer(folder, settings(start_timeout_s=1), [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(ConfigError, match="make vllm"):
        VllmServer(folder, VllmSettings(python="/no/such/python"))


def test_a_server_sees_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices("cpu") == {"CUDA_VISIBLE_DEVICES": ""}
    assert (visible_devices("cuda"), visible_devices("cuda:2")) == ({}, {"CUDA_VISIBLE_DEVICES": "2"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a")
    assert visible_devices("cuda:1") == {"CUDA_VISIBLE_DEVICES": "GPU-a"}
    with pytest.raises(ConfigError, match=r"generator.device = 'cuda:2', but CUDA_VISIBLE_DEVICES = '5,GPU-a' has 2"):
        visible_devices("cuda:2")
    monkeypatch.setenv("LLAMARL_PLACED", "1")
    assert visible_devices("cuda:2") == {}, "it sees the executor's devices alone already"


def test_rollouts_do_not_hang_when_the_server_is_killed(folder: Path) -> None:
    with fake_engine(folder) as engine:
        engine.submit([request(sampling={"max_new_tokens": 500})])
        engine.step()
        (keeper,) = [pid for pid in children(os.getpid()) if "vllm/plugin" in Path(f"/proc/{pid}/cmdline").read_text()]
        (server,) = children(keeper)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(VllmFailed, match="/inference/v1/generate"):
            conformance.drain(engine)


PARENT = """
import sys, time
from llamarl.parts.vllm.server import VllmServer, VllmSettings
server = VllmServer(sys.argv[1], VllmSettings(python=sys.executable), [sys.executable, sys.argv[2]])
print(server._keeper.pid, server.log_path, flush=True)
time.sleep(60)
"""


@nightly("a parent that is killed; child processes end with theirs in tests/sandbox by day")
def test_nothing_stays_when_the_parent_is_killed(folder: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(folder), str(FAKE)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, log_path = parent.stdout.readline().split()
        processes = [int(pid), *children(int(pid))]
        assert len(processes) == 2 and all(map(is_alive, processes))
        parent.kill()
    wait_for(lambda: not any(map(is_alive, processes)))
    wait_for(lambda: not Path(log_path).parent.exists())


@dataclass
class VllmServed:
    """For the conformance suite: weights come through a transport."""

    backend: VllmEngine
    publisher: Publisher
    kv_on_update: Literal["keep", "recompute"]

    def update(self, model: Transformer, version: int) -> None:
        address = self.publisher.publish(version, dict(model.named_parameters()), in_use=())
        subscriber = self.backend.subscribe(address, self.backend.specs(), 0)
        subscriber.fetch(version, address)
        assert len(subscriber.fingerprint) == 16 and subscriber.received_bytes > 0
        self.backend.set_version(version)


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[VllmEngine]:
    options = {"dtype": "float32", "max_running": 16, "prefill_tokens": 48, "kv_bytes": 64 << 20}
    engine = VllmEngine(folder, VllmSettings(python=PYTHON, **options))
    yield engine
    engine.close()


@contextmanager
def publishing(transport: str, engine: VllmEngine, folder: Path) -> Iterator[Publisher]:
    held = [TensorSpec.whole(spec.name, spec.global_shape, "float32") for spec in engine.specs()]
    (plan,) = plan_writers([lay_out(engine.specs())], [held])
    options = {"folder": folder / "weights"} if transport == "file" else {}
    publisher = publisher_class(transport)(plan, lambda value: [value], **options)
    try:
        yield publisher
    finally:
        publisher.close()


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("transport", "kv_on_update"), [("shared_memory", "keep"), ("shared_memory", "recompute"), ("file", "keep")]
)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance(
    check: Callable[[conformance.Start], None], transport: str, kv_on_update: Literal["keep", "recompute"],
    vllm: VllmEngine, tmp_path: Path,
) -> None:  # fmt: skip
    @contextmanager
    def start(model: Transformer) -> Iterator[VllmServed]:
        vllm.kv_on_update = kv_on_update
        # Two at once take three times as long as six at once: time enough to change weights in flight.
        vllm._max_sent = 2 if check is conformance.check_update_in_flight else 32
        with publishing(transport, vllm, tmp_path) as publisher:
            served = VllmServed(backend=vllm, publisher=publisher, kv_on_update=kv_on_update)
            served.update(model, 0)
            try:
                yield served
            finally:
                vllm.abort(range(1000))
                conformance.drain(vllm)

    # On a busy machine vLLM samples on while its answers wait, and is done when it is to be interrupted.
    for _ in range(4 if check.__name__ in RACING else 0):
        try:
            check(start)
        except AssertionError:
            continue
        return
    check(start)
