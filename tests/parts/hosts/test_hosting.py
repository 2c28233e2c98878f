"""Who computes on which host, with which devices, as hosts come and go."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import ParallelismConfig
from llamarl.parts.hosts.home import Inventory
from llamarl.parts.hosts.hosting import HostPlacer, NoRoom
from llamarl.run.placement import WantedExecutor
from tests.nightly import examples


class Machine:
    """What `HostPlacer` looks at of a host."""

    def __init__(self, name: str, gpus: int = 0, cores: int = 4) -> None:
        self.name, self.is_leaving = name, False
        self.inventory = Inventory(
            name=name, address="10.0.0.1", weights_address="10.0.0.1", logs="", cores=cores, memory_bytes=1, gpus=gpus,
            code="", python="", packages={}, pid=1,
        )  # fmt: skip


def machines(**gpus: int) -> dict[str, Any]:
    return {name: Machine(name, number) for name, number in gpus.items()}


def config_of(place: dict[str, list[str]] | None = None, **sections: dict[str, Any]) -> RunConfig:
    cluster = {"kind": "hosts", "listen": "10.0.0.1:6700", "place": place or {}}
    base = {"model": {"path": "m"}, "data": {"train": "running_total"}, "cluster": cluster}
    return RunConfig.model_validate(base | sections)


def where(hosting: HostPlacer) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(share.name for share in hosting.place(name)) for role in ROLES for name in hosting.of_role(role)
    }


ROLES = ("trainer", "critic", "generator", "reward", "reward_model", "reference")
GPUS: dict[str, Any] = {
    "trainer": {"device": "cuda", "parallelism": {"fsdp": 4}},
    "generator": {"device": "cuda", "replicas": 6, "tensor_parallel": 2},
}


def test_by_default_generators_are_beside_the_trainer_s_host_in_turn() -> None:
    hosting = HostPlacer(config_of(generator={"replicas": 3}), machines(c=0, b=0, d=0))
    generators = {"generator-0": ("c",), "generator-1": ("d",), "generator-2": ("c",)}
    assert where(hosting) == {"trainer": ("b",), **generators, "reward": ("b",)}
    assert where(HostPlacer(config_of(), machines(b=0)))["generator-0"] == ("b",)


def operations(num_hosts: int, **sections: dict[str, Any]) -> tuple[int, int]:
    """Calls of functions that the placement on so many hosts takes, from the first look to the environment of each
    executor's ranks; and the number of executors."""
    config = config_of(cluster={"kind": "hosts", "listen": "10.0.0.1:6700", "num_hosts": num_hosts}, **sections)
    hosts, count = machines(**{f"n-{i:03}": 8 for i in range(num_hosts)}), 0

    def called(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        hosting = HostPlacer(config, hosts)
        placed = [hosting.place(name) for role in ROLES for name in hosting.of_role(role)]
        assert {name for host in hosts for name in hosting.on_host(host)} >= set(hosting.of_role("generator"))
        hosting.crowded()
    finally:
        sys.setprofile(None)
    return count, len(placed)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("replicas", ["fixed", "auto"])
def test_placement_is_linear_in_hosts_and_executors(device: str, replicas: str) -> None:
    def sections(num_hosts: int) -> dict[str, dict[str, Any]]:
        number = "auto" if replicas == "auto" else 4 * num_hosts
        trainer = {"device": "cuda", "parallelism": {"fsdp": 4 * num_hosts}} if device == "cuda" else {}
        return {"trainer": trainer, "generator": {"device": device, "replicas": number, "threads": 1}}

    (few, few_placed), (many, many_placed) = (operations(number, **sections(number)) for number in (32, 64))
    assert 1.9 < many_placed / few_placed < 2.1 and few_placed > 100
    assert many < 2.2 * few


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 12),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from([[], ["n-[0-3]"]]),
)
def test_generators_placed_in_one_go_are_where_they_are_one_by_one(
    gpus: list[int], ranks: int, replicas: int, device: str, patterns: list[str]
) -> None:
    generator = {"device": device, "replicas": replicas or "auto", "tensor_parallel": ranks, "threads": 1}
    config = config_of({"generator": patterns}, generator=generator)
    hosts = machines(**{f"n-{i}": number for i, number in enumerate(gpus)})

    class OneByOne(HostPlacer):
        def _assign_in_turn(self, wanted: WantedExecutor) -> None:
            return None

    found = list[Any]()
    for placer in (HostPlacer, OneByOne):
        try:
            hosting = placer(config, hosts)
            found.append({name: hosting.place(name) for role in ROLES for name in hosting.of_role(role)})
        except NoRoom as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_patterns_name_hosts_and_trainer_ranks_share_them_evenly() -> None:
    place = {"trainer": ["n-[12]"], "generator": ["n-3", "x*"], "reward": ["n-3"]}
    sections = {"trainer": {"parallelism": {"fsdp": 4}}, "generator": {"replicas": 2}}
    hosts = {f"n-{i}": Machine(f"n-{i}") for i in (1, 2, 3)}
    hosting = HostPlacer(config_of(place, **sections), hosts)  # pyrefly: ignore[bad-argument-type]
    assert where(hosting) == {
        "trainer": ("n-1", "n-2"), "generator-0": ("n-3",), "generator-1": ("n-3",), "reward": ("n-3",),
    }  # fmt: skip
    assert hosting.table()[:3] == [
        "executor     ranks  host  devices",
        "trainer          2  n-1   cpu",
        "trainer          2  n-2   cpu",
    ]
    place["trainer"] = ["n-*"]
    uneven = HostPlacer(config_of(place, **sections), hosts).place("trainer")  # pyrefly: ignore[bad-argument-type]
    assert [(share.name, share.num_ranks) for share in uneven] == [("n-1", 1), ("n-2", 1), ("n-3", 2)]
    with pytest.raises(NoRoom, match=r"trainer finds no host that match cluster.place.trainer = \['y'\]; .*: n-1"):
        HostPlacer(config_of({"trainer": ["y"]}), hosts)  # pyrefly: ignore[bad-argument-type]


def test_devices_are_counted_out_per_host() -> None:
    hosting = HostPlacer(config_of(**GPUS), machines(a=8, b=8))
    assert where(hosting)["trainer"] == ("a",)
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "LLAMARL_PLACED": "1", "LLAMARL_ALONE": "1"}
    assert hosting.place("trainer") == (("a", 4, env),)
    # b has no trainer and is filled first; what is left goes beside the trainer
    assert [where(hosting)[f"generator-{i}"] for i in range(6)] == [("b",)] * 4 + [("a",)] * 2
    seen = [hosting.place(f"generator-{i}")[0].env["CUDA_VISIBLE_DEVICES"] for i in range(6)]
    assert seen == ["0,1", "2,3", "4,5", "6,7", "4,5", "6,7"]
    assert hosting.place("reward")[0].env["CUDA_VISIBLE_DEVICES"] == ""
    assert hosting.free_generator_slots() == 0
    with pytest.raises(NoRoom, match=r"generator-6 needs 2 GPUs.* b has 0"):
        hosting.take_generator(6)


def test_a_trainer_takes_as_few_hosts_as_have_its_devices() -> None:
    sections = {"trainer": {"device": "cuda", "parallelism": {"fsdp": 16}}, "generator": {"device": "cuda"}}
    hosting = HostPlacer(config_of(**sections), machines(a=8, b=4, c=8, d=1))
    assert where(hosting) == {"trainer": ("a", "c"), "generator-0": ("b",), "reward": ("a",)}
    uneven = HostPlacer(config_of(**sections), machines(a=8, b=6, d=3)).place("trainer")
    assert [(share.name, share.num_ranks) for share in uneven] == [("a", 8), ("b", 6), ("d", 2)]
    with pytest.raises(NoRoom, match=r"trainer needs 16 GPUs.* a has 8, b has 4"):
        HostPlacer(config_of(**sections), machines(a=8, b=4))


def test_named_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator.device = 'cuda:0' names devices, which are counted out"):
        HostPlacer(config_of(generator={"device": "cuda:0"}), machines(a=1))


def test_auto_fills_what_there_is_and_later_what_comes() -> None:
    hosts = machines(a=0, b=0)
    hosting = HostPlacer(config_of(generator={"replicas": "auto", "threads": 2}), hosts)
    assert where(hosting) == {"trainer": ("a",), "reward": ("a",), "generator-0": ("b",), "generator-1": ("b",)}
    assert hosting.free_generator_slots() == 0
    hosts["c"] = Machine("c", cores=1)  # too few cores for its threads, and still worth one
    assert hosting.free_generator_slots() == 1
    assert hosting.take_generator(7)[0].name == "c"
    del hosts["b"]
    hosting.leave("generator-0")
    assert hosting.free_generator_slots() == 0
    hosts["b"] = Machine("b", cores=8)
    assert hosting.free_generator_slots() == 3, "generator-1 has not left yet"
    hosts["b"].is_leaving = True
    assert hosting.free_generator_slots() == 0
    with pytest.raises(NoRoom, match=r"generator-0 finds no host.*: a, b \(is about to leave\), c$"):
        HostPlacer(config_of({"generator": ["z"]}, generator={"replicas": "auto"}), hosts)


def test_a_fixed_number_is_never_exceeded() -> None:
    hosts = machines(a=0, b=0)
    hosting = HostPlacer(config_of(generator={"replicas": 2}), hosts)
    assert hosting.free_generator_slots() == 0
    del hosts["b"]
    for name in ("generator-0", "generator-1"):
        hosting.leave(name)
    assert hosting.free_generator_slots() == 2
    assert hosting.take_generator(2)[0].name == "a", "beside the trainer when nothing else is left"
    hosts["c"] = Machine("c")
    assert hosting.take_generator(3)[0].name == "c"
    assert hosting.free_generator_slots() == 0
    assert hosting.on_host("a") == ["trainer", "reward", "generator-2"]


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_no_device_is_given_twice(data: st.DataObject) -> None:
    hosts = {name: Machine(name, data.draw(st.integers(0, 8))) for name in "abcd"[: data.draw(st.integers(1, 4))]}
    trainer = {
        "device": data.draw(st.sampled_from(["cpu", "cuda"])),
        "parallelism": {"fsdp": data.draw(st.integers(1, 8))},
    }
    generator = {
        "device": "cuda",
        "replicas": data.draw(st.sampled_from(["auto", 1, 3])),
        "tensor_parallel": data.draw(st.sampled_from([1, 2])),
    }
    try:
        hosting = HostPlacer(config_of(trainer=trainer, generator=generator), hosts)  # pyrefly: ignore[bad-argument-type]
    except ConfigError:
        return
    for step in range(data.draw(st.integers(0, 6))):
        if data.draw(st.booleans()) and hosting.free_generator_slots():
            hosting.take_generator(100 + step)
        elif names := hosting.of_role("generator"):
            hosting.leave(data.draw(st.sampled_from(names)))
    used = list[tuple[str, str]]()
    for role in ROLES:
        for name in hosting.of_role(role):
            for host, _, env in hosting.place(name):
                numbers = [number for number in env["CUDA_VISIBLE_DEVICES"].split(",") if number]
                used += [(host, number) for number in numbers]
                assert all(int(number) < hosts[host].inventory.gpus for number in numbers)
    assert len(set(used)) == len(used)
    replicas = generator["replicas"]
    assert replicas == "auto" or len(hosting.of_role("generator")) <= replicas


def test_a_trainer_whose_host_is_lost_goes_where_nobody_is_then_to_others() -> None:
    """With as many hosts as the run needs, that see its folder, and within cluster.place."""
    place, sections = {"generator": ["c"]}, {"generator": {"replicas": 1}}
    config = config_of(place, **sections)
    cluster = config.cluster.model_copy(update={"num_hosts": 3, "min_hosts": 1})
    hosts: dict[str, Any] = machines(b=0, c=0, d=0)
    hosting = HostPlacer(config.model_copy(update={"cluster": cluster}), hosts)
    hosting.lacks.update(dict.fromkeys(hosts.values(), ""))
    assert where(hosting) == {"trainer": ("b",), "generator-0": ("c",), "reward": ("b",)}
    del hosts["b"]
    assert hosting.again("trainer")[0].name == "d"
    assert hosting.again("reward")[0].name == "d", "as it is with the trainer"
    del hosts["d"]
    hosts.update(e=Machine("e"), f=Machine("f"))
    hosting.lacks[hosts["e"]] = "does not see the run's folder /runs/r: another folder is there"
    assert hosting.again("trainer")[0].name == "c", "e has another folder, and nobody has looked at f"
    hosts["g"] = hosts.pop("c")
    hosts["g"].is_leaving = True
    with pytest.raises(NoRoom) as refused:
        hosting.again("trainer")
    assert str(refused.value) == (
        "trainer finds no host; these are here: e (does not see the run's folder /runs/r: another folder is there), f "
        "(was not looked at yet), g (is about to leave)"
    )
    hosts.clear()
    with pytest.raises(NoRoom, match=r"^0 hosts are left, and the run needs 1 \(cluster.min_hosts\)$"):
        hosting.again("trainer")


def test_fewer_hosts_than_the_run_needs_start_no_trainer() -> None:
    for min_hosts, setting in ((0, "num_hosts; cluster.min_hosts allows for fewer"), (2, "min_hosts")):
        config = config_of(generator={"replicas": 1})
        cluster = config.cluster.model_copy(update={"num_hosts": 2, "min_hosts": min_hosts})
        hosts: dict[str, Any] = machines(b=0, c=0)
        hosting = HostPlacer(config.model_copy(update={"cluster": cluster}), hosts)
        del hosts["b"]
        with pytest.raises(NoRoom, match=rf"^1 host is left, and the run needs 2 \(cluster.{setting}\)$"):
            hosting.again("trainer")
        assert hosting.again("reward")[0].name == "c"
        hosts["d"] = Machine("d")
        assert hosting.again("trainer")[0].name == "d"


def going_on(num_hosts: int, **sections: dict[str, Any]) -> RunConfig:
    """With a host at least."""
    config = config_of(**sections)
    cluster = config.cluster.model_copy(update={"num_hosts": num_hosts, "min_hosts": 1})
    return config.model_copy(update={"cluster": cluster})


def test_a_run_that_goes_on_with_fewer_hosts_has_fewer_generators_and_trainer_ranks() -> None:
    hosting = HostPlacer(going_on(2, **GPUS), machines(a=8))
    assert hosting.of_role("generator") == ["generator-0", "generator-1"] and hosting.layout("trainer") is None
    hosting = HostPlacer(going_on(2, **GPUS), machines(a=5))
    assert hosting.of_role("generator") == ["generator-0"]
    assert str(hosting.layout("trainer")) == "fsdp 2, tp 1, pp 1, cp 1" and hosting.place("trainer")[0].num_ranks == 2
    with pytest.raises(NoRoom, match=r"trainer needs 4 GPUs.* a has 2"):
        HostPlacer(going_on(2, **GPUS), machines(a=2))
    with pytest.raises(NoRoom, match="generator-2 needs 2 GPUs"):
        HostPlacer(config_of(**GPUS), machines(a=8))


def test_a_trainer_that_starts_again_takes_free_devices_then_those_of_generators_then_fewer() -> None:
    hosts: dict[str, Any] = machines(a=4, b=8, c=8)
    hosting = HostPlacer(going_on(3, **GPUS), hosts)
    assert [where(hosting)[f"generator-{i}"] for i in range(6)] == [("b",), ("c",)] * 3
    del hosts["a"]
    hosting.again("trainer")
    assert hosting.devices("trainer") == [("b", 6), ("b", 7), ("c", 6), ("c", 7)] and hosting.displaced() == []
    del hosts["c"]
    hosting.again("trainer")
    assert hosting.devices("trainer") == [("b", 4), ("b", 5), ("b", 6), ("b", 7)] and hosting.layout("trainer") is None
    assert hosting.displaced() == ["generator-4"] and hosting.displaced() == []
    assert hosting.of_role("generator") == ["generator-0", "generator-2"] and hosting.free_generator_slots() == 0


def test_where_too_few_devices_are_left_a_trainer_has_the_nearest_layout() -> None:
    sections = GPUS | {"trainer": {"device": "cuda", "parallelism": {"fsdp": 3, "tp": 2}}}
    sections["generator"] = GPUS["generator"] | {"replicas": 3}
    hosts: dict[str, Any] = machines(a=6, b=6)
    hosting = HostPlacer(going_on(2, **sections), hosts)
    del hosts["a"]
    (share,) = hosting.again("trainer")
    assert share.num_ranks == 3 and str(hosting.layout("trainer")) == "fsdp 3, tp 1, pp 1, cp 1"
    assert len(hosting.of_role("generator")) == 1 and len(hosting.displaced()) == 2
    hosts["a"], hosts["c"] = machines(a=6, c=6).values()
    del hosts["b"]
    assert hosting.again("trainer")[0].num_ranks == 6 and hosting.layout("trainer") is None, "as the settings say"
    del hosts["a"], hosts["c"]
    hosts["d"] = Machine("d", 2)
    with pytest.raises(NoRoom, match=r"trainer needs 6 GPUs.* d has 2"):
        hosting.again("trainer")


def test_smaller_layouts_divide_and_keep_the_model_s_cuts_longest() -> None:
    layout = ParallelismConfig(fsdp=4, tp=2)
    assert [str(one)[:-12] for one in layout.smaller()] == [
        "fsdp 2, tp 2", "fsdp 4, tp 1", "fsdp 1, tp 2", "fsdp 2, tp 1", "fsdp 1, tp 1",
    ]  # fmt: skip
    assert [(one.fsdp, one.ep) for one in ParallelismConfig(fsdp=12, ep=4).smaller()] == [
        (6, 2), (4, 4), (3, 1), (2, 2), (1, 1),
    ]  # fmt: skip


def test_threads_are_counted_on_each_host() -> None:
    """Three in all are none too many for two cores if no host has them together."""
    hosts = {name: Machine(name, cores=2) for name in ("b", "c")}
    assert HostPlacer(config_of(generator={"replicas": 2}), hosts).crowded() == []
    place = {"trainer": ["b"], "generator": ["b"]}
    (said,) = HostPlacer(config_of(place, generator={"replicas": 2}), hosts).crowded()
    assert said.startswith("3 CPU threads work at once on the 2 cores of host b, which is slow; ")
    assert said.endswith(", or name other hosts in cluster.place")
    judged = {"generator": {"replicas": 1}, "reward": {"model": {"path": "r", "threads": 3}}}
    (said,) = HostPlacer(config_of({"reward_model": ["c"]}, **judged), hosts).crowded()
    assert said.startswith("4 CPU threads work at once on the 2 cores of host c")
