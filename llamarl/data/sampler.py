"""The order in which prompts are drawn: endless, shuffled anew each epoch, and resumable at any point."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from llamarl.config.errors import ConfigError


class PromptSampler:
    """Draws each of `num_prompts` indices once per epoch. The order depends on (seed, epoch) alone."""

    def __init__(self, num_prompts: int, seed: int, fingerprint: int = 0) -> None:
        """`fingerprint`: of what the indices stand for."""
        if num_prompts < 1:
            raise ConfigError(f"{num_prompts} prompts to draw from; the data must hold at least one")
        self._num_prompts = num_prompts
        self._seed = seed
        self._fingerprint = fingerprint
        self._epoch = 0
        self._position = 0
        self._order = self._shuffle()

    def next(self) -> int:
        """Index of the next prompt, 0 to num_prompts - 1."""
        if self._position == self._num_prompts:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffle()
        index = int(self._order[self._position])
        self._position += 1
        return index

    def state(self) -> dict[str, int]:
        """The sampler's position, as plain JSON for `restore`."""
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Goes on exactly where `state()` was taken.

        Raises:
            ConfigError: the state is that of other data or another seed, so its order would not be this one.
        """
        for name, own in (("num_prompts", self._num_prompts), ("seed", self._seed)):
            if state[name] != own:
                raise ConfigError(
                    f"the checkpoint drew prompts with {name} = {state[name]} and this run has {own}; "
                    "resume with the data and seed it began with"
                )
        if state.get("fingerprint", self._fingerprint) != self._fingerprint:
            raise ConfigError(
                f"the checkpoint drew from {self._num_prompts} other prompts, or answers, than data.train has now; "
                "resume with the data it began with, or start another run with another --name"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffle()

    def _shuffle(self) -> np.ndarray:
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._num_prompts)


def fingerprint(rows: Iterable[tuple[str, np.ndarray]]) -> int:
    """Fingerprint of text and tokens per row, in order."""
    digest = xxhash.xxh3_64()
    for text, token_ids_T in rows:
        for part in (text.encode(errors="surrogatepass"), np.asarray(token_ids_T, np.int64).tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.intdigest()
