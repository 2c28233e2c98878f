"""Who computes on which devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError, RunConfig
from llamarl.config.section import named_devices
from llamarl.distributed import mesh
from llamarl.run.placement import MPS_FOLDER, LocalPlacer, ranges


def config_of(**sections: dict[str, Any]) -> RunConfig:
    rollout = sections.pop("rollout", {})
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "running_total"}, "rollout": rollout, **sections}
    )


def devices(placer: LocalPlacer) -> dict[str, tuple[int, ...]]:
    rows = (line.split() for line in placer.table()[1:])
    return {name: named_devices(f"cuda:{rest[-1]}") if rest[1] == "cuda" else () for name, *rest in rows}


def env(placer: LocalPlacer, executor: str) -> dict[str, str]:
    (share,) = placer.place(executor)
    assert share.name == "", "this machine"
    return share.env


FOUR_AND_FOUR = {
    "trainer": {"device": "cuda", "parallelism": {"fsdp": 4}},
    "generator": {"device": "cuda", "replicas": 4},
}


def test_a_trainer_of_four_beside_four_replicas_fills_a_host_of_eight() -> None:
    placer = LocalPlacer(config_of(**FOUR_AND_FOUR), 8)
    placer.check()
    replicas = {f"generator-{i}": (4 + i,) for i in range(4)}
    assert devices(placer) == {"trainer": (0, 1, 2, 3), **replicas, "reward": ()}
    assert placer.table() == [
        "executor     ranks  devices",
        "trainer          4  cuda 0-3",
        *(f"generator-{i}      1  cuda {4 + i}" for i in range(4)),
        "reward           1  cpu",
    ]


def test_processes_that_share_a_gpu_are_named_with_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a daemon of CUDA MPS if there is a living one, else by time. Executors of one process, or in turns, do not."""
    monkeypatch.setenv(MPS_FOLDER, str(tmp_path))
    both = {"trainer": {"device": "cuda:1"}, "generator": {"device": "cuda:1"}}

    def sharing(**cluster: str) -> str:
        rollout = {"max_staleness": 0, "window": 1} if "placement" in cluster else {}
        return LocalPlacer(config_of(**both, rollout=rollout, cluster={"kind": "processes", **cluster}), 2).sharing

    off = f"generator-0, trainer share cuda 1 by time, because CUDA MPS is off (no daemon at {tmp_path})"
    assert sharing() == off
    (tmp_path / "control").touch()
    assert sharing() == "generator-0, trainer share cuda 1 by CUDA MPS"
    number = tmp_path / "nvidia-cuda-mps-control.pid"
    number.write_text(f"{os.getpid()}\n")
    assert sharing().endswith("by CUDA MPS")
    number.write_text("4194999\n")  # larger than any: the daemon was killed and has left its pipes
    assert sharing() == off
    assert sharing(kind="inline") == sharing(placement="colocated") == ""
    apart = {"trainer": {"device": "cuda:0"}, "generator": {"device": "cuda:1"}}
    assert LocalPlacer(config_of(**apart), 2).sharing == ""


def test_all_roles_are_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    placer = LocalPlacer(
        config_of(
            trainer={"device": "cuda", "advantage": "gae"},
            critic={"device": "cuda", "parallelism": {"tp": 2}},
            generator={"device": "cuda", "tensor_parallel": 2, "replicas": 2},
            reference={"device": "cuda", "kl_coefficient": 0.1},
            reward={"model": {"path": "r", "device": "cuda"}},
        ),
        9,
    )
    placer.check()
    assert devices(placer) == {
        "trainer": (0,), "critic": (1, 2), "generator-0": (3, 4), "generator-1": (5, 6), "reward-model": (7,),
        "reference": (8,), "reward": (),
    }  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = {"CUDA_VISIBLE_DEVICES": "5,6", "LLAMARL_PLACED": "1", "LLAMARL_ALONE": "1"}
    assert env(placer, "generator-1") == own
    assert env(placer, "reward")["CUDA_VISIBLE_DEVICES"] == "", "it makes no context on anybody's GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(f"GPU-{i}" for i in range(9)))
    assert env(placer, "critic")["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"


def test_too_few_are_refused_with_the_table() -> None:
    placer = LocalPlacer(config_of(**FOUR_AND_FOUR), 7)
    with pytest.raises(ConfigError, match=r"8 GPUs are needed and this host has 7; lower .*:\n  executor [^$]*cuda 7"):
        placer.check()


def test_without_gpus_there_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.device = 'cuda', generator.device = 'cuda', but torch sees"):
        LocalPlacer(config_of(**FOUR_AND_FOUR), 0).check()


def test_named_devices_are_left_to_who_names_them_and_may_be_shared() -> None:
    sections = {"trainer": {"device": "cuda:0,2", "parallelism": {"tp": 2}}, "reference": {"kl_coefficient": 0.1}}
    sections["generator"] = {"device": "cuda", "replicas": 2}
    sections["reference"]["device"] = "cuda:2"
    found = devices(LocalPlacer(config_of(**sections), 4))
    assert found["trainer"] == (0, 2) and found["reference"] == (2,)
    assert (found["generator-0"], found["generator-1"]) == ((1,), (3,))


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:4-7", [(4, 5), (6, 7)]), ("cuda:1,0", [(1, 0), (1, 0)]), ("cpu", [(), ()])]
)
def test_named_devices_of_replicas(device: str, expected: list[tuple[int, ...]]) -> None:
    config = config_of(generator={"device": device, "tensor_parallel": 2, "replicas": 2})
    found = devices(LocalPlacer(config, 8))
    assert [found["generator-0"], found["generator-1"]] == expected


@pytest.mark.parametrize("device", ["cuda", "cuda:4-7", "cuda:1,0", "cpu"])
def test_a_generator_that_comes_takes_what_one_that_went_had(device: str) -> None:
    placer = LocalPlacer(config_of(generator={"device": device, "tensor_parallel": 2, "replicas": 2}), 8)
    before = {name: placer.place(name) for name in placer.of_role("generator")}
    assert placer.free_generator_slots() == 0
    placer.leave("generator-0")
    placer.leave("generator-0")
    assert placer.of_role("generator") == ["generator-1"] and placer.free_generator_slots() == 1
    assert placer.take_generator(7) == before["generator-0"] and placer.free_generator_slots() == 0
    placer.leave("generator-7")
    placer.leave("generator-1")
    found = [placer.take_generator(number) for number in (8, 9)]
    assert found == list(before.values()) and placer.again("generator-9") == before["generator-1"]


@pytest.mark.parametrize(("device", "count"), [("cuda:4", 1), ("cuda:0-4", 5)])
def test_names_that_are_not_one_for_each_rank_are_refused(device: str, count: int) -> None:
    config = config_of(trainer={"device": device, "parallelism": {"fsdp": 4}})
    said = f"trainer.device = '{device}' names {count} devices for 4 ranks; name one for each"
    with pytest.raises(ConfigError, match=said):
        LocalPlacer(config, 8)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:0,0", "cuda:3-1", "cuda:-1", "CPU"])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="is not a device; use 'cpu', 'cuda', or 'cuda:0,2-3' to name some, each once"):
        config_of(trainer={"device": device})


def test_colocated_roles_count_from_the_first_device() -> None:
    sections = FOUR_AND_FOUR | {"cluster": {"placement": "colocated"}, "rollout": {"max_staleness": 0}}
    placer = LocalPlacer(config_of(**sections), 4)
    placer.check()
    found = devices(placer)
    assert found["trainer"] == (0, 1, 2, 3) and [found[f"generator-{i}"] for i in range(4)] == [(0,), (1,), (2,), (3,)]


def test_one_process_needs_one_device() -> None:
    sections = {"trainer": {"device": "cuda"}, "generator": {"device": "cuda", "replicas": 3}}
    placer = LocalPlacer(config_of(**sections, cluster={"kind": "inline"}), 1)
    placer.check()
    assert set(devices(placer).values()) == {(), (0,)}


def test_without_gpus_nothing_is_counted_or_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.run.placement.count_devices", lambda: pytest.fail("torch is not asked"))
    placer = LocalPlacer(config_of())
    placer.check()
    assert placer.lack == "" and env(placer, "trainer") == {}


def test_long_tables_are_cut() -> None:
    table = LocalPlacer(config_of(generator={"device": "cuda", "replicas": 100}), 100).table()
    assert len(table) == 24 and table[-2].split() == ["..."] and table[-1].startswith("reward ")


def test_threads_that_work_at_once_are_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    sections: dict[str, Any] = {"trainer": {"threads": 3}, "generator": {"replicas": 2}}
    (said,) = LocalPlacer(config_of(**sections)).crowded()
    assert said.startswith("5 CPU threads work at once on the 4 cores here, which is slow; lower trainer.threads")
    in_turn = {"cluster": {"placement": "colocated"}, "rollout": {"max_staleness": 0}}
    assert LocalPlacer(config_of(**sections, **in_turn)).crowded() == []
    assert LocalPlacer(config_of(**sections | {"generator": {"device": "cuda"}}), 1).crowded() == []
    sections["reward"] = {"model": {"path": "r", "threads": 4}}
    (said,) = LocalPlacer(config_of(**sections, **in_turn)).crowded()
    assert said.startswith("6 CPU threads"), "generators and the models that judge"


def test_who_has_a_device_for_itself_is_told() -> None:
    """Nobody where two name one, or take turns on it."""

    def alone(**sections: Any) -> list[str]:
        placer = LocalPlacer(config_of(**sections), num_devices=8)
        names = ("trainer", "generator-0", "generator-1")
        return [name for name in names if placer.place(name)[0].env.get("LLAMARL_ALONE")]

    two = {"replicas": 2, "device": "cuda"}
    assert alone(trainer={"device": "cuda"}, generator=two) == ["trainer", "generator-0", "generator-1"]
    assert alone(trainer={"device": "cuda:0"}, generator=two | {"device": "cuda:0-1"}) == ["generator-1"]
    assert alone(trainer={"device": "cpu"}, generator=two | {"device": "cpu"}) == []
    turns = {"rollout": {"max_staleness": 0}, "cluster": {"placement": "colocated"}}
    assert alone(trainer={"device": "cuda"}, generator=two, **turns) == ["generator-1"]


@pytest.mark.parametrize(("text", "numbers"), [("cuda", ()), ("cuda:3", (3,)), ("cuda:0,2-4,9", (0, 2, 3, 4, 9))])
def test_names_and_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert named_devices(text) == numbers
    assert ranges(numbers) == text.partition(":")[2]


def test_an_executor_takes_its_rank_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that it sees alone; in one process those that are named."""
    made = []
    monkeypatch.setattr(mesh.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mesh.torch.cuda, "set_device", made.append)
    monkeypatch.setattr(mesh.torch, "set_num_threads", lambda _: None)
    assert str(mesh.set_up_device("cuda:2,5", 1, "x")) == "cuda:2"
    monkeypatch.setenv("LLAMARL_PLACED", "1")
    assert str(mesh.set_up_device("cuda:2,5", 1, "x")) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(mesh.set_up_device("cuda:2,5", 1, "x")) == str(mesh.set_up_device("cuda", 1, "x")) == "cuda:1"
    assert list(map(str, made)) == ["cuda:2", "cuda:0", "cuda:1", "cuda:1"]
