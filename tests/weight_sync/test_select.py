"""The fastest transport that works is taken, and one that is pinned is not measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from llamarl.cluster.api import RemoteError
from llamarl.config.errors import ConfigError
from llamarl.weight_sync.base import FingerprintMismatch
from llamarl.weight_sync.layout import TensorSpec
from llamarl.weight_sync.select import candidates, publisher_class, sample, select


class Links:
    """Transports that take a given time, in a loop whose clock they move."""

    def __init__(self, seconds: dict[str, float | Exception]) -> None:
        self._seconds = seconds
        self.now_s = 0.0
        self.calls = list[str]()

    async def sync(self, name: str) -> None:
        self.calls.append(name)
        wanted = self._seconds[name]
        if isinstance(wanted, Exception):
            raise wanted
        self.now_s += wanted * (100 if self.calls.count(name) == 1 else 1)  # the first is slow everywhere

    def select(self, pinned: str = "auto"):
        async def run():
            asyncio.get_running_loop().time = lambda: self.now_s
            return await select(pinned, self._seconds, self.sync, 1_000_000_000)

        return asyncio.run(run())


def failure(cause: Exception) -> RemoteError:
    error = RemoteError("generator-0", "adopt", "traceback")
    error.__cause__ = cause
    return error


def test_the_fastest_is_taken_and_all_are_shown() -> None:
    found = Links({"file": 2.0, "shared_memory": 0.125, "p2p": 0.5}).select()
    assert found.transport == "shared_memory"
    assert found.table() == [
        "* shared_memory     8.00 GB/s",
        "  p2p               2.00 GB/s",
        "  file              0.50 GB/s",
    ]


@pytest.mark.parametrize(("file_s", "chosen"), [(0.4, "shared_memory"), (0.3, "file")])
def test_a_small_lead_is_noise(file_s: float, chosen: str) -> None:
    """The order of the candidates decides unless one is more than half as fast again."""
    assert Links({"shared_memory": 0.5, "p2p": 2.0, "file": file_s}).select().transport == chosen


def test_a_fast_one_that_is_wrong_is_not_taken() -> None:
    wrong = failure(FingerprintMismatch("w", 0, 1, "it differs"))
    found = Links({"shared_memory": wrong, "p2p": 0.5}).select()
    assert found.transport == "p2p"
    assert found.table()[1] == "  shared_memory   w of version 0 on generator rank 1: it differs"


def test_none_that_works_is_an_error_with_reasons() -> None:
    with pytest.raises(ConfigError, match=r"finds no transport .* \(p2p: refused; file: no folder\)"):
        Links({"p2p": failure(OSError("refused")), "file": failure(OSError("no folder"))}).select()


def test_a_pinned_one_is_not_measured() -> None:
    links = Links({"p2p": 0.5, "file": 1.0})
    assert links.select("file").transport == "file"
    assert links.calls == []


def test_gpus_that_exchange_weights_slowly_are_reported() -> None:
    """As when UCX falls back to TCP without an error; memory of the host may be as slow as that."""
    assert "cuda_ipc at 2 GB/s" in Links({"cuda_ipc": 0.5, "nixl": 1.0}).select().warning
    assert not Links({"cuda_ipc": 0.1}).select().warning
    assert not Links({"shared_memory": 0.5}).select().warning
    assert not replace(Links({"nixl": 0.5}).select(), same_host=False).warning


def test_memory_and_folders_are_tried_on_one_host_only() -> None:
    here, elsewhere = (candidates(same_host=same, same_process=False, delta=False) for same in (True, False))
    assert here == ["shared_memory", "p2p", "file"] and elsewhere == ["p2p"]
    assert candidates(same_host=True, same_process=True, delta=False) == ["shared_memory"]


def test_gpus_read_from_each_other() -> None:
    found = candidates(same_host=True, same_process=False, delta=False, on_gpu=True)
    assert set(found) == {"shared_memory", "p2p", "file", "nixl", "cuda_ipc"}
    assert "nixl" not in candidates(same_host=True, same_process=False, delta=True, on_gpu=True)


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'carrier_pigeon'` is unknown; use auto, cuda_ipc, file, in_place, nixl, p2p, shared_memory"
    ):
        publisher_class("carrier_pigeon")(None, None)


def test_a_sample_is_bounded_and_spread_over_the_model() -> None:
    specs = [TensorSpec.whole(f"w{number}", (1000, 1 + number % 3), "float32") for number in range(300)]
    chosen = sample(specs, 200_000)
    assert 150_000 < sum(spec.num_bytes for spec in chosen) < 220_000
    numbers = [int(spec.name[1:]) for spec in chosen]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 250
    assert sample(specs, 10**9) == tuple(specs)
