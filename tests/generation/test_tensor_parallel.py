"""Several ranks generate what one does, in lockstep, and say so when one is lost. gloo and real processes.

What GPUs add, NCCL, is not covered here.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from llamarl.config.errors import RanksLost
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import RankMesh
from llamarl.generation.engine import Engine, EngineSettings, kv_budget
from llamarl.generation.model import GeneratorModel
from llamarl.generation.tensor_parallel import FollowerRank, ModelRanks, TensorParallelEngine
from llamarl.models.transformer import Transformer
from llamarl.types import CandidateSets, FinishReason
from tests.distributed.ranks import Worker, Workers, join, rendezvous
from tests.generation.conformance import (
    CHECKS,
    GREEDY,
    Check,
    conformance_model,
    make_requests,
)
from tests.generation.references import drain, drive, run
from tests.kernels.engines import engine as computed_by
from tests.nightly import NIGHTLY, nightly


def build(mesh: RankMesh, folder: Path, graphs: bool = False) -> tuple[GeneratorModel, Engine]:
    """A rank's part of the weights of version 0 in `folder`, and an engine over it."""
    model = GeneratorModel(conformance_model().shape, "float32", "cpu", ModelRanks(mesh.tp))
    load(model, folder, 0)
    kv_bytes = min(mesh.exchange(kv_budget(model, 16)))
    return model, Engine(model, EngineSettings(max_running=16, prefill_tokens=64, kv_bytes=kv_bytes, graphs=graphs))


def load(model: GeneratorModel, folder: Path, version: int) -> None:
    model.load(torch.load(folder / f"{version}.pt"))


def follow(where: Rendezvous, folder: Path, rank: int, size: int, mishap: str, graphs: bool) -> str:
    """Any rank but 0, in its process; what ended it."""
    with computed_by("torch") if graphs else nullcontext():
        return follow_here(where, folder, rank, size, mishap, graphs)


def follow_here(where: Rendezvous, folder: Path, rank: int, size: int, mishap: str, graphs: bool) -> str:
    mesh = join(where, rank, {"tp": size}, timeout_s=240.0)
    model, engine = build(mesh, folder, graphs)
    first = model.weights_at

    def use(version: int) -> None:
        load(model, folder, version)
        if mishap == "reuse":  # the allocator gives the memory of earlier weights again, on this rank only
            model.weights_at = first

    follower = FollowerRank(engine, mesh, use)
    follower.report(7, f"part {rank}")
    idle = 0
    try:
        while not follower.stopped:
            idle += not follower.follow()
            if mishap and engine.stats().decode_tokens > 20:
                fail(mishap, engine)
    except BaseException as error:
        return repr(error)
    finally:
        follower.close()
    return f"stopped after {idle} idle waits"


def fail(mishap: str, engine: Engine) -> None:
    if mishap == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mishap == "raise":
        engine.step = explode  # type: ignore[method-assign]
    if mishap == "drift":
        engine.abort([10])


def explode() -> None:
    raise MemoryError("no memory left")


@dataclass
class Served:
    """For the conformance suite."""

    backend: TensorParallelEngine
    model: GeneratorModel
    folder: Path
    pids: list[int | None]
    kv_on_update: Literal["keep", "recompute"] = "keep"

    def update(self, model: Transformer, version: int) -> None:
        torch.save(model.state_dict(), self.folder / f"{version}.pt")
        load(self.model, self.folder, version)
        self.backend.set_version(version)


@contextmanager
def serve(
    workers: Workers, size: int, folder: Path, mishap: str = "", graphs: bool = False
) -> Iterator[tuple[Served, list[Worker]]]:
    """Rank 0 is here; the last rank has the mishap."""
    torch.save(conformance_model().state_dict(), folder / "0.pt")
    with rendezvous() as where, workers.take(size - 1) as others:
        for rank, worker in enumerate(others, start=1):
            worker.start(follow, where, folder, rank, size, mishap if rank == size - 1 else "", graphs)
        mesh = join(where, 0, {"tp": size}, timeout_s=240.0)
        try:
            model, engine = build(mesh, folder, graphs)
            yield (
                Served(TensorParallelEngine(engine, mesh), model, folder, [worker.process.pid for worker in others]),
                others,
            )
        finally:
            mesh.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


def assert_equals_one_rank(served: Served) -> None:
    sampled = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)
    requests = make_requests(4, GREEDY)
    requests += [replace(one, group_id=one.group_id + 50, sampling=sampled) for one in requests]
    model = conformance_model()
    alone = GeneratorModel(model.shape, "float32", "cpu")
    alone.load(model)
    engine = Engine(alone, EngineSettings(max_running=16, prefill_tokens=64, kv_bytes=None))
    served.update(model, 0)
    expected, found = run(engine, requests), run(served.backend, requests)
    assert found.keys() == expected.keys()
    for key, rollout in expected.items():
        np.testing.assert_array_equal(found[key].token_ids_T, rollout.token_ids_T)
        np.testing.assert_allclose(found[key].behavior_logprobs_T, rollout.behavior_logprobs_T, atol=1e-5)
    sequences = [one.prompt_token_ids_T for one in requests[:3]]
    cutoffs = [np.full(len(ids_T) - 1, -3.0, np.float32) for ids_T in sequences]
    candidates = CandidateSets(temperature=0.9, cutoffs=cutoffs)
    for found_T, expected_T in zip(served.backend.score(sequences), engine.score(sequences), strict=True):
        np.testing.assert_allclose(found_T, expected_T, atol=1e-5)
    for found_3_T, expected_3_T in zip(
        *(one.score(sequences, candidates) for one in (served.backend, engine)), strict=True
    ):
        np.testing.assert_allclose(found_3_T, expected_3_T, atol=1e-5)
        assert len(found_3_T[0]) < 2 or (found_3_T[2] > found_3_T[1]).any()


@nightly("processes; two ranks equal one by day")
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_four_ranks_equal_one(workers: Workers, tmp_path: Path, graphs: bool) -> None:
    """Each of the two kv heads is on two ranks. Captured steps run as functions, collectives included."""
    kernels = computed_by("torch") if graphs else nullcontext()
    with kernels, serve(workers, 4, tmp_path, graphs=graphs) as (served, others):
        assert_equals_one_rank(served)
        served.backend.close()
        assert all(worker.result().startswith("stopped after") for worker in others)


def test_ranks_that_would_not_capture_together_end_before_the_step(workers: Workers, tmp_path: Path) -> None:
    """One would replay a graph of earlier weights, and the others would capture one, with collectives that it lacks."""
    with computed_by("torch"), serve(workers, 2, tmp_path, mishap="reuse", graphs=True) as (served, others):
        run(served.backend, make_requests(3, GREEDY))
        served.update(conformance_model(), 1)
        with pytest.raises(RanksLost, match=r"OutOfStep: rank 0 has CUDA graphs .* generator\.cuda_graphs = 'off'"):
            run(served.backend, make_requests(3, GREEDY))
        assert "OutOfStep" in others[0].result()


def test_all_ranks_report_a_version(workers: Workers, tmp_path: Path) -> None:
    with serve(workers, 4, tmp_path) as (served, others):
        backend = served.backend
        deadline_s = time.monotonic() + 240.0
        assert backend.reports(7) is None, "rank 0 has not got it"
        backend.report(7, "part 0")
        while (reports := backend.reports(7)) is None:
            assert time.monotonic() < deadline_s
        assert reports == [f"part {rank}" for rank in range(4)]
        start_s, busy_s = time.monotonic(), time.thread_time()
        assert backend.reports(8, wait_s=0.1) is None
        assert time.monotonic() - start_s > 0.2 and time.thread_time() - busy_s < 0.1, "it sleeps"
        backend.close()
        assert all(worker.result().startswith("stopped after") for worker in others)


@pytest.mark.parametrize(
    ("mishap", "cause"),
    [("die", "rank 3 is gone"), ("raise", "MemoryError: no memory left"), ("drift", "OutOfStep: rank 0 has done")],
)
def test_a_lost_rank_ends_all(mishap: str, cause: str, workers: Workers, tmp_path: Path) -> None:
    with serve(workers, 4, tmp_path, mishap=mishap) as (served, others):
        backend = served.backend
        backend.submit(make_requests(3, replace(GREEDY, max_new_tokens=400)))
        with pytest.raises(RanksLost, match=cause) as raised:
            drive(backend, lambda: not backend.has_work)
        assert not re.search("rank [12]", str(raised.value)), "they have only lost the others"
        with pytest.raises(RanksLost):
            backend.step()
        assert all("RanksLost" in worker.result() for worker in others[:2])
        if mishap == "die":
            others[2].process.join(240.0)
        else:
            assert others[2].result().startswith(("MemoryError", "OutOfStep"))


@nightly("real time; by day a lost rank ends all")
def test_followers_notice_that_rank_0_is_gone(workers: Workers, tmp_path: Path) -> None:
    with serve(workers, 4, tmp_path) as (served, others):
        assert run(served.backend, make_requests(1, GREEDY))
        served.backend._mesh.close()
        assert all("waited for rank 0" in worker.result() for worker in others)


# This process can be in one mesh at a time, so those of the ranks that live on come last.


@pytest.fixture(scope="module")
def two(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two ranks that live through the whole suite."""
    with serve(workers, 2, tmp_path_factory.mktemp("weights")) as (served, others):
        yield served
        served.backend.close()
        assert others[0].result().startswith("stopped after")


@pytest.mark.parametrize("check", CHECKS if NIGHTLY else CHECKS[::3], ids=lambda check: check.__name__)
def test_conformance(check: Check, two: Served) -> None:
    @contextmanager
    def start(model: Transformer) -> Iterator[Served]:
        two.update(model, 0)
        yield two
        drain(two.backend)

    check(start)


def test_two_ranks_equal_one(two: Served) -> None:
    assert_equals_one_rank(two)


def test_all_ranks_hold_and_release_alike(two: Served) -> None:
    """Else the next step would be out of step."""
    backend, stops = two.backend, replace(GREEDY, temperature=1.0, stop_token_ids=tuple(range(0, 96, 3)))
    requests = [replace(one, sampling=stops, has_turns=True) for one in make_requests(3, GREEDY)]
    held = [key for key, one in run(backend, requests).items() if one.finish_reason is FinishReason.STOP]
    assert len(held) > 3 and backend.stats().kv_use > 0
    backend.release(held[:2])
    assert run(backend, [replace(one, group_id=one.group_id + 80) for one in make_requests(2, GREEDY)])
    assert backend.stats().kv_use > 0
    backend.release(held)
    assert backend.stats().kv_use == 0
    assert run(backend, [replace(one, group_id=one.group_id + 90) for one in make_requests(2, GREEDY)])


def cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@nightly("real time; by day a lost rank ends all")
def test_an_idle_rank_uses_no_core(two: Served) -> None:
    requests = make_requests(2, GREEDY)
    assert len(run(two.backend, requests)) == 4
    start_s = cpu_s(two.pids[0])
    time.sleep(1.0)
    assert cpu_s(two.pids[0]) - start_s < 0.1
    assert len(run(two.backend, requests)) == 4, "awake at once"
