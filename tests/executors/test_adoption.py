"""Rank 0 and the weights of its generator. What a fetch does, tests/weight_sync shows; adoption itself, test_parity."""

from __future__ import annotations

from typing import cast

from llamarl.executors.generator import WAIT_S, Adopter, Adoptions
from llamarl.executors.replies import Adoption
from llamarl.generation.tensor_parallel import TensorParallelEngine
from llamarl.weight_sync.layout import Address

ADDRESS = Address(transport="file", publisher="", num_writers=1, places={})
ADOPTED = Adoption(version=3, fingerprint="1f", num_bytes=5)


class Fetched:
    """Rank 0 has its part at once."""

    def __init__(self) -> None:
        self.found: list[Adoption | None] = [ADOPTED]
        self.used = list[int]()

    def begin(self, version: int, address: Address) -> None:
        """Done already."""

    def poll(self, wait_s: float) -> Adoption | None:
        return self.found.pop() if self.found else None

    def use(self, version: int) -> None:
        self.used.append(version)


class Ranks(TensorParallelEngine):
    """An idle engine whose other rank needs three looks."""

    has_work = False

    def __init__(self) -> None:
        self.waits_s = list[float]()
        self.version = -1

    def report(self, version: int, outcome: Adoption) -> None:
        assert (version, outcome) == (3, ADOPTED)

    def reports(self, version: int, wait_s: float = 0.0) -> list[Adoption] | None:
        self.waits_s.append(wait_s)
        return [ADOPTED, ADOPTED] if len(self.waits_s) == 3 else None

    def set_version(self, version: int) -> None:
        self.version = version


def test_tokens_carry_the_version_of_the_weights_that_made_them() -> None:
    """Also one that is sampled at the very moment in which the version becomes another one."""
    fetched, tokens = Fetched(), list[tuple[int, int]]()

    class Sampling(Ranks):
        def set_version(self, version: int) -> None:
            super().set_version(version)
            tokens.append((version, fetched.used[-1] if fetched.used else -1))

    adoptions = Adoptions(cast(Adopter, fetched), Sampling())
    adoptions.begin(3, ADDRESS)
    while adoptions.is_waiting:
        adoptions.proceed()
    assert tokens == [(3, 3)]


def test_an_idle_rank_0_waits_for_the_others_and_does_not_spin_nor_keep_calls_waiting() -> None:
    fetched, engine = Fetched(), Ranks()
    adoptions = Adoptions(cast(Adopter, fetched), engine)
    reply = adoptions.begin(3, ADDRESS)
    for number in (1, 2):
        assert not reply.done() and len(engine.waits_s) == number, "one wait, then calls"
        adoptions.proceed()
    adoption = reply.result(timeout=0)
    assert engine.waits_s == [WAIT_S] * 3
    assert (adoption.outcome, adoption.num_bytes, fetched.used, engine.version) == ("adopted", 10, [3], 3)
