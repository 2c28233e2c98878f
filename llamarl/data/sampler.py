"""Order of prompts: endless, reshuffled each epoch, and resumable at any point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import lcm
from typing import Any, Protocol

import numpy as np
import xxhash

from llamarl.config.errors import ConfigError

SamplerState = dict[str, Any]
"""Plain JSON."""


class PromptOrder(Protocol):
    """Draws indices of prompts, without end."""

    def next(self) -> int: ...

    def state(self) -> SamplerState: ...

    def restore(self, state: SamplerState) -> None: ...


class PromptSampler:
    """Draws each of `num_prompts` indices once per epoch. The order depends only on seed, epoch and a source's label,
    so that two sources with the same data have different orders."""

    def __init__(self, num_prompts: int, seed: int, fingerprint: int = 0, label: str = "") -> None:
        """
        Args:
            fingerprint: of the prompts and answers behind the indices.
            label: of the source in a mixture.
        """
        if num_prompts < 1:
            raise ConfigError(f"{num_prompts} prompts to draw from; the data must hold at least one")
        self._num_prompts = num_prompts
        self._seed = seed
        self._of_source = (xxhash.xxh3_64_intdigest(label.encode()),) if label else ()
        self._fingerprint = fingerprint
        self._epoch = 0
        self._position = 0
        self._order = self._shuffle()

    def next(self) -> int:
        """Returns the index of the next prompt, 0 to num_prompts - 1."""
        if self._position == self._num_prompts:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffle()
        index = int(self._order[self._position])
        self._position += 1
        return index

    @property
    def num_drawn(self) -> int:
        """Prompts drawn so far, over all epochs."""
        return self._epoch * self._num_prompts + self._position

    def state(self) -> SamplerState:
        """Returns the position as plain JSON for `restore`."""
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: SamplerState) -> None:
        """Continues exactly where `state()` was taken.

        Raises:
            ConfigError: the state belongs to other data or another seed, so its order would differ.
        """
        if "sources" in state:
            raise ConfigError(
                f"the checkpoint drew from the mixture of {', '.join(state['sources'])}, and data.train is a single "
                "source; resume with the original data"
            )
        for name, own in (("num_prompts", self._num_prompts), ("seed", self._seed)):
            if state[name] != own:
                raise ConfigError(
                    f"the checkpoint drew prompts with {name} = {state[name]} and this run has {own}; "
                    "resume with the original data and seed"
                )
        if state.get("fingerprint", self._fingerprint) != self._fingerprint:
            raise ConfigError(
                f"the checkpoint drew from {self._num_prompts} other prompts, or answers, than data.train has now; "
                "resume with the original data, or start another run with another --name"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffle()

    def _shuffle(self) -> np.ndarray:
        return np.random.default_rng((self._seed, self._epoch, *self._of_source)).permutation(self._num_prompts)


class MixtureSampler:
    """Draws from several samplers in the exact ratio of their weights: after n draws, each source has given its share
    of n, rounded up or down.

    The next source follows from the numbers drawn so far, by the quota method of Balinski and Young (1975): of the
    sources below their share of n + 1 prompts, the one whose next prompt is due first. Random draws would have the same
    shares in the long run, but noise in each step, which adds variance to gradients. The only state is the position of
    each sampler.
    """

    def __init__(
        self, samplers: Mapping[str, PromptSampler], weights: Mapping[str, float], sizes: Mapping[str, int]
    ) -> None:
        """
        Args:
            samplers: of the sources, by label.
            weights: by label, above 0. Only their ratios matter.
            sizes: number of prompts by label. Indices of a source start after those of the sources before it.
        """
        fractions = {label: Fraction(weights[label]) for label in samplers}  # exact: floats are fractions
        scale = lcm(*(one.denominator for one in fractions.values()))
        self._samplers, self._weights = dict(samplers), dict(weights)
        self._due = {label: int(one * scale) for label, one in fractions.items()}
        self._total = sum(self._due.values())
        self._first, before = dict[str, int](), 0
        for label in samplers:
            self._first[label], before = before, before + sizes[label]

    def next(self) -> int:
        """Returns the index of the next prompt, 0 to the sum of all sizes - 1."""
        given = {label: one.num_drawn for label, one in self._samplers.items()}
        drawn = sum(given.values()) + 1
        behind = [label for label in given if given[label] * self._total < drawn * self._due[label]]
        label = min(behind, key=lambda label: Fraction(given[label] + 1, self._due[label]))
        return self._first[label] + self._samplers[label].next()

    def state(self) -> SamplerState:
        """Returns the samplers' positions and the mixture as plain JSON for `restore`."""
        return {
            "sources": {label: one.state() | {"weight": self._weights[label]} for label, one in self._samplers.items()}
        }

    def restore(self, state: SamplerState) -> None:
        """Continues exactly where `state()` was taken.

        Raises:
            ConfigError: the state belongs to another mixture, other data or another seed.
        """
        if "sources" not in state:
            raise ConfigError(
                f"the checkpoint drew from a single source, and data.train now mixes {', '.join(self._samplers)}; "
                "resume with the original data"
            )
        before = state["sources"]
        if list(before) != list(self._samplers):
            raise ConfigError(
                f"the checkpoint drew from the sources {', '.join(before)}, and data.train now has "
                f"{', '.join(self._samplers)}; resume with the original sources"
            )
        for label, one in self._samplers.items():
            if before[label]["weight"] != self._weights[label]:
                raise ConfigError(
                    f"the checkpoint drew from source {label!r} with weight = {before[label]['weight']:g}, now it has "
                    f"{self._weights[label]:g}; resume with the original weights"
                )
            try:
                one.restore(before[label])
            except ConfigError as error:
                raise ConfigError(f"source {label!r}: {error}") from None


def fingerprint(rows: Iterable[tuple[str, np.ndarray]]) -> int:
    """Returns a fingerprint of text and tokens of all rows, in order."""
    digest = xxhash.xxh3_64()
    for text, token_ids_T in rows:
        for part in (text.encode(errors="surrogatepass"), np.asarray(token_ids_T, np.int64).tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.intdigest()
