"""What a machine has against what a run takes: lines for people, and one sentence for what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError, RunConfig
from llamarl.models.fit import CONTEXT_BYTES, GIB, holdings
from llamarl.models.memory import total
from llamarl.models.shape import ModelShape
from llamarl.run import memory, placement
from llamarl.run.memory import MachineMemory, check_memory, described_machine, memory_lines
from tests.nightly import nightly

SHAPE = ModelShape(
    family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14_336, vocab_size=128_256, max_position_embeddings=8192,
)  # fmt: skip


def run_of(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "running_total"}, **sections})


CPU = run_of(generator={"replicas": 2, "dtype": "bfloat16", "kv_cache_bytes": 1 << 30})
GPU = run_of(
    trainer={"device": "cuda:0", "dtype": "bfloat16", "activation_checkpointing": True},
    generator={"device": "cuda:1", "dtype": "bfloat16"},
)
SHARED = run_of(
    trainer={"device": "cuda:0", "dtype": "bfloat16", "activation_checkpointing": True},
    generator={"device": "cuda:0", "dtype": "bfloat16"},
)


def needed(config: RunConfig) -> list[float]:
    return [float(one.num_ranks * total(one.parts)) for one in holdings(config, SHAPE, {})]


def test_a_run_that_no_memory_of_this_host_holds_is_refused() -> None:
    least = sum(needed(CPU))
    check_memory(CPU, SHAPE, MachineMemory(host=least + 1))
    said = (
        r"the trainer takes \d+\.\d+ GiB \(activations .*, checkpoint 89\.75, moments 59\.83, .*\) of this host "
        r"next to generator-0 .* GiB \(weights .*\), generator-1 .*, and \d+\.\d+ GiB are there; "
        r"set trainer\.activation_checkpointing = true, with which it fits"
    )
    with pytest.raises(ConfigError, match=said):
        check_memory(CPU, SHAPE, MachineMemory(host=least - 1))


def test_what_no_lever_makes_fit_says_by_how_much() -> None:
    with pytest.raises(
        ConfigError, match=r"and 1\.00 GiB are there; with .* it still lacks \d+\.\d+ GiB; use a smaller"
    ):
        check_memory(CPU, SHAPE, MachineMemory(host=GIB))


def test_each_gpu_is_filled_by_those_on_it() -> None:
    trainer, generator = (size + CONTEXT_BYTES for size in needed(GPU))
    enough = MachineMemory(host=1000 * GIB, gpus=(int(trainer) + 1, int(generator) + 1))
    check_memory(GPU, SHAPE, enough)
    for gpus, who in (
        ((int(trainer) - 1, int(generator) + 1), "trainer"),
        ((int(trainer) + 1, int(generator) - 1), "gen"),
    ):
        with pytest.raises(ConfigError, match=rf"the {who}.* of cuda:[01], and .* are there; set "):
            check_memory(GPU, SHAPE, replace(enough, gpus=gpus))
    both = int(trainer + generator)
    check_memory(SHARED, SHAPE, MachineMemory(host=1000 * GIB, gpus=(both + 1,)))
    with pytest.raises(ConfigError, match=r"the trainer takes .* of cuda:0 next to generator-0 .* are there; "):
        check_memory(SHARED, SHAPE, MachineMemory(host=1000 * GIB, gpus=(both - 1,)))


def test_copies_of_a_gpu_s_state_count_on_the_host() -> None:
    enough = MachineMemory(host=1000 * GIB, gpus=(1000 << 30,) * 2)
    check_memory(GPU, SHAPE, enough)
    with pytest.raises(ConfigError, match=r"the trainer takes .*\(checkpoint 89\.75, slots .*\) of this host, and "):
        check_memory(GPU, SHAPE, replace(enough, host=100 * GIB))


def test_ranks_that_share_a_state_copy_it_once() -> None:
    """On the host, together; on the GPUs a half each."""
    places = []
    for fsdp in (1, 2):
        config = run_of(trainer={"device": "cuda", "parallelism": {"fsdp": fsdp}})
        places.append(memory.shares(config, memory.run_holdings(config, SHAPE), 2))
    one, two = places
    for kind in ("checkpoint", "slots"):
        assert one[memory.HOST]["trainer"][kind] == pytest.approx(two[memory.HOST]["trainer"][kind])
    for place in ("cuda:0", "cuda:1"):
        assert two[place]["trainer"]["moments"] == one["cuda:0"]["trainer"]["moments"] / 2


def test_sharing_over_more_gpus_is_a_lever_where_there_are_some() -> None:
    """Of 26B with adapters, for which nothing cheaper is left."""
    trainer = {
        "device": "cuda", "dtype": "bfloat16", "activation_checkpointing": True, "lora": {"rank": 16},
        "microbatch_tokens": 2048,
    }  # fmt: skip
    config, large = run_of(trainer=trainer), replace(SHAPE, num_layers=120)
    for num_gpus, said in ((4, "; set trainer.parallelism.fsdp = 2, with which it fits"), (1, "it still lacks")):
        with pytest.raises(ConfigError) as refused:
            check_memory(config, large, MachineMemory(host=1000 * GIB, gpus=(48 << 30,) * num_gpus))
        assert said in str(refused.value)


def test_gpus_that_are_not_here_are_not_compared() -> None:
    check_memory(GPU, SHAPE, MachineMemory(host=1000 * GIB))
    lines = memory_lines(GPU, SHAPE, MachineMemory(host=1000 * GIB))
    assert [line.split()[0] for line in lines] == ["executor", "trainer", "generator-0", "cuda:0:", "cuda:1:", "this"]
    assert lines[3].endswith("GiB at least, and the free memory is not known")
    assert lines[5].endswith("GiB at least, and 1000.00 GiB are there")
    assert "; of its host " in lines[1] and "more for keys and values if memory is free" in lines[2]


def test_a_machine_that_is_not_here() -> None:
    """Its GPUs are compared, and its processors' memory is not known."""
    assert described_machine("0") == MachineMemory(host=None)
    two = described_machine("2x160")
    assert two == MachineMemory(host=None, gpus=(160_000_000_000, 160_000_000_000))
    check_memory(GPU, SHAPE, two)
    assert memory_lines(GPU, SHAPE, two)[-1].endswith("GiB at least, and the free memory is not known")
    with pytest.raises(ConfigError, match=r"of cuda:0, and 74.51 GiB are there; set trainer"):
        check_memory(GPU, SHAPE, described_machine("2x80"))
    for text in ("8", "x80", "0x80", "8x", "8x80GB", "-1x80", "eight"):
        with pytest.raises(ConfigError, match=f"--gpus = '{text}': write number and GB of each, such as 8x80, or 0"):
            described_machine(text)


def test_hosts_are_known_when_they_call() -> None:
    config = run_of(cluster={"kind": "hosts", "listen": "127.0.0.1:1"}, weight_sync={"transport": "p2p"})
    assert memory_lines(config, SHAPE, MachineMemory(host=GIB))[-1].endswith("known when they connect")


def test_another_model_counts_by_its_own_size(tmp_path: Path) -> None:
    small = replace(SHAPE, num_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(small.to_hf()))
    config = run_of(reference={"kl_coefficient": 0.1, "path": str(tmp_path), "dtype": "float32"})
    (held,) = [one for one in memory.run_holdings(config, SHAPE) if one.executor == "reference"]
    assert held.parts["weights"] == pytest.approx(4 * small.num_parameters, rel=0.01)


@nightly("starts a process for each; by day levers are named for one machine")
def test_gpus_are_asked_for_their_size_only_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    monkeypatch.setattr(memory, "device_bytes", lambda: asked.append(True) or (5,))
    assert memory.machine_memory(CPU).gpus == () and not asked
    assert memory.machine_memory(GPU).gpus == (5,) and asked
    placement.device_bytes.cache_clear()
    assert placement.count_devices() == len(placement.device_bytes())
