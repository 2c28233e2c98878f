"""The reward model executor: a sequence classification model that scores responses.

Shape suffixes: N packed tokens, T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import numpy as np
import torch

from llamarl.cluster.api import Executor
from llamarl.config import RunConfig
from llamarl.data.tokenizer import TOKENIZER_FILE, Tokenizer
from llamarl.distributed.mesh import set_up_device
from llamarl.generation.sampler import packs
from llamarl.models.attention import causal_attend
from llamarl.models.scalar import load_scalar_model
from llamarl.rewards._base import MAX_REWARD, invalid
from llamarl.training.packing import sequences_of
from llamarl.types import Outcome, Prompt, RewardResult, Rollout


class RewardModelExecutor(Executor):
    """Reads prompt and response and says one number at the last token.

    With the policy's tokenizer it reads the very tokens that were sampled, the stop token included; otherwise their
    text, in its own tokens. Of an agent's episode it reads the longest sequence, and of several the last.
    """

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, config: RunConfig) -> None:
        settings = config.reward.model
        assert settings is not None
        self._device = set_up_device(settings.device, settings.threads, "reward.model.device")
        dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._model = load_scalar_model(settings.path, dtype, self._device, new_head=False).eval()
        self._policys, self._own = Tokenizer(config.model.path), Tokenizer(settings.path)
        files = [one.folder / TOKENIZER_FILE for one in (self._policys, self._own)]
        self._has_policys_tokens = files[0].read_bytes() == files[1].read_bytes()
        self._batch_tokens = settings.batch_tokens

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[RewardResult]]:
        """One list per group, one entry per rollout."""
        return [self._score([self._tokens(prompt, one) for one in rollouts]) for prompt, rollouts in groups]

    def _tokens(self, prompt: Prompt, rollout: Rollout) -> np.ndarray:
        if "sequence" in rollout.columns:
            ids_T = max((one["token_ids"] for one in reversed(sequences_of(rollout.columns))), key=len)
            return ids_T if self._has_policys_tokens else self._own.encode(self._policys.decode(ids_T))
        if self._has_policys_tokens:
            return np.concatenate([prompt.token_ids_T, rollout.token_ids_T])
        return self._own.encode(prompt.text + self._policys.decode(rollout.token_ids_T))

    def _score(self, sequences: Sequence[np.ndarray]) -> list[RewardResult]:
        """Results of one group; it is computed by itself, so that its bits do not depend on what else has arrived."""
        longest = self._model.shape.max_position_embeddings
        results = [
            invalid(f"{len(ids_T)} tokens, and the reward model reads 1 to {longest}") for ids_T in sequences
        ]  # fmt: skip
        readable = [index for index, ids_T in enumerate(sequences) if 0 < len(ids_T) <= longest]
        batches = packs((sequences[index] for index in readable), self._batch_tokens)
        for index, score in zip(readable, chain.from_iterable(map(self._forward, batches)), strict=True):
            answer = RewardResult(outcome=Outcome.SCORE, value=score)
            results[index] = answer if abs(score) <= MAX_REWARD else invalid(f"the reward model said {score}")
        return results

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[np.ndarray]) -> list[float]:
        lengths = [len(ids_T) for ids_T in sequences]
        ids_N, positions_N, last = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self._device, non_blocking=True)
            for parts in (sequences, [np.arange(length) for length in lengths], [np.cumsum(lengths) - 1])
        )
        hidden_N_D = self._model(ids_N, positions_N, causal_attend(lengths))
        return self._model.scalars(hidden_N_D[last]).tolist()
