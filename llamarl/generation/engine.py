"""`Engine`: continuous batching of rollouts, one token each per step.

    submit -> Scheduler.schedule -> [parked rows leave, new rows join] -> forward -> Sampler -> finished rollouts leave

One step is one forward over packed tokens: the next token of every running rollout, then up to `prefill_tokens` of
prompts. Weights may be swapped between two steps: the KV cache is kept, and each token carries the version that
sampled it. A parked rollout prefills its tokens again when it resumes, with the weights of that moment.

Shape suffixes: T tokens of one sequence, B running rollouts, N packed tokens, J kv heads, D model dim, V vocabulary.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.attention import DecodePlan, PagedAttention
from llamarl.generation.kv_cache import BLOCK_SIZE, KVCache
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import Sampler
from llamarl.generation.scheduler import Chunk, Schedule, Scheduler
from llamarl.generation.sequence import Group, Sequence
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Where an engine stands. Counters start at 0 with the engine."""

    running: int
    """Rollouts that decode."""
    waiting: int
    """Rollouts that have no blocks: not admitted yet, or parked."""
    kv_use: float
    """Share of KV blocks in use, 0 to 1."""
    decode_tokens: int
    """Tokens sampled."""
    prefill_tokens: int
    """Tokens prefilled, those of resumed rollouts included."""
    steps: int
    """Forwards."""
    parked: int
    """Times that a rollout lost its blocks to an older one."""


class Engine:
    """Generates rollouts with one model on one device. Not thread-safe: call everything from one thread."""

    def __init__(
        self, model: Transformer, *, max_running: int, prefill_tokens: int, kv_bytes: int | None, version: int = 0
    ) -> None:
        """
        Args:
            max_running: rollouts that decode at once.
            prefill_tokens: prompt tokens that join one step at most.
            kv_bytes: memory for keys and values. None: what `max_running` full contexts need, but at most a quarter of
                the machine's memory (CPU) or half of what is free (GPU).
            version: policy version of the model's weights.
        """
        shape, weight = model.shape, model.head_weight_V_D
        self.model = model
        self.version = version
        self._device = weight.device
        self._context = shape.max_position_embeddings
        block_bytes = KVCache.block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, weight.dtype)
        if kv_bytes is None:
            full = max_running * -(-self._context // BLOCK_SIZE) * block_bytes
            kv_bytes = min(full, _spare_bytes(weight.device))
        num_blocks = kv_bytes // block_bytes
        self._cache = KVCache(
            num_layers=shape.num_layers, num_blocks=num_blocks, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        self._scheduler = Scheduler(num_blocks, BLOCK_SIZE, max_running, prefill_tokens)
        self._rows = Rows(max_running, BLOCK_SIZE)
        self._sampler = Sampler(weight.device)
        self._refused: list[Rollout] = []
        self._decode_tokens = self._prefill_tokens = self._steps = 0

    @property
    def has_work(self) -> bool:
        """`step` has something to do or to return."""
        return bool(self._scheduler.groups or self._refused)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests, first in first out. The next `step` returns those that cannot run, as FAILED rollouts.

        Raises:
            ValueError: a group id is in the engine already; nothing was queued.
        """
        requests = list(requests)
        counts = Counter(request.group_id for request in requests)
        counts.update(i for i in counts.keys() & self._scheduler.groups.keys())
        twice = sorted(i for i, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"group ids {twice} are submitted twice; each names one request")
        for request in requests:
            prompt_T = np.array(request.prompt_token_ids_T, np.int32).reshape(-1)
            limit = min(request.sampling.max_new_tokens, self._context - len(prompt_T))
            group = Group(request, prompt_T, limit)
            group.unfinished = {index: Sequence(group, index) for index in range(request.group_size)}
            error = self._refusal(group)
            if error:
                self._refused += [one.rollout(FinishReason.FAILED, error) for one in group.unfinished.values()]
            else:
                self._scheduler.add(group)

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Take groups back: their unfinished rollouts, with the tokens so far. Ids not in the engine are ignored."""
        groups = self._scheduler.groups
        aborted = [one for i in group_ids if i in groups for one in groups[i].unfinished.values()]
        return self._leave(dict.fromkeys(aborted, (FinishReason.ABORTED, "")))

    def set_version(self, version: int) -> None:
        """Tokens sampled from now on carry `version`: the weights were swapped in place, between two steps."""
        self.version = version

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """One token for each running rollout and some prefill; returns the rollouts that finished."""
        finished, self._refused = self._refused, []
        plan = self._scheduler.schedule()
        self._seat(plan)
        if not self._rows.sequences and not plan.chunks:
            return finished
        hidden_N_D = self._forward(plan.chunks)
        self._steps += 1
        if self._rows.sequences:
            finished += self._sample(hidden_N_D[: len(self._rows)])
        return finished

    def stats(self) -> EngineStats:
        pool = self._scheduler.pool
        return EngineStats(
            running=len(self._rows),
            waiting=len(self._scheduler.waiting),
            kv_use=(pool.num_blocks - pool.num_free) / max(pool.num_blocks, 1),
            decode_tokens=self._decode_tokens,
            prefill_tokens=self._prefill_tokens,
            steps=self._steps,
            parked=self._scheduler.num_parked,
        )

    def _refusal(self, group: Group) -> str:
        """Why a request cannot run; empty when it can."""
        prompt_T, vocabulary = group.prompt_T, self.model.shape.vocab_size
        if not len(prompt_T):
            return "the prompt is empty; at least one token is needed"
        if len(prompt_T) >= self._context:
            return f"the prompt has {len(prompt_T)} tokens and the context {self._context}; no token can be generated"
        if prompt_T.min() < 0 or prompt_T.max() >= vocabulary:
            bad = prompt_T[(prompt_T < 0) | (prompt_T >= vocabulary)][0]
            return f"the prompt has token id {bad}, outside the vocabulary of {vocabulary}"
        error = _bad_sampling(group.request.sampling)
        if error:
            return error
        # Own tokens that are fed: the last prompt token and the response without its last token.
        if not self._scheduler.fits(group.prefix_tokens, group.limit):
            tokens = self._scheduler.pool.num_blocks * BLOCK_SIZE
            return (
                f"the KV cache holds {tokens} tokens, too few for a prompt of {len(prompt_T)} and a response of "
                f"{group.limit}; raise the KV budget or lower max_new_tokens"
            )
        return ""

    def _seat(self, plan: Schedule) -> None:
        """Rows leave, join and grow as the schedule says."""
        for sequence in plan.parked:
            if sequence.row >= 0:
                self._rows.remove(sequence)
        for sequence in plan.grown:
            self._rows.grow(sequence)
        for sequence in plan.joined:
            self._rows.add(sequence)
        if plan.new_blocks:
            self._cache.clear(plan.new_blocks)

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        """Hidden states of the running rows, then of the chunks."""
        rows, count = self._rows, len(self._rows)
        own_B = rows.length_R[:count]
        token_ids, positions = [rows.input_R[:count]], [rows.position_R[:count]]
        blocks, offsets = [rows.blocks_R_M[np.arange(count), own_B // BLOCK_SIZE]], [own_B % BLOCK_SIZE]
        for chunk in chunks:
            group, sequence, places = chunk.group, chunk.sequence, np.arange(chunk.start, chunk.stop)
            segment = group.prefix if sequence is None else sequence.own
            blocks.append(np.array(segment.blocks)[places // BLOCK_SIZE])
            offsets.append(places % BLOCK_SIZE)
            if sequence is None:
                token_ids.append(group.prompt_T[chunk.start : chunk.stop])
                positions.append(places)
            else:
                token_ids.append(sequence.own_token_ids(chunk.start, chunk.stop))
                positions.append(places + group.prefix_tokens)
            self._prefill_tokens += len(places)
        slots_NJ = self._cache.slots(np.concatenate(blocks), np.concatenate(offsets))
        dtype = self.model.head_weight_V_D.dtype
        decode = DecodePlan(self._cache, rows, self.model.shape.num_heads, dtype) if count else None
        attend = PagedAttention(self._cache, slots_NJ, decode, chunks)
        return self.model(self._tensor(np.concatenate(token_ids)), self._tensor(np.concatenate(positions)), attend)

    def _sample(self, hidden_B_D: Tensor) -> list[Rollout]:
        """Every running rollout gets a token; returns those that finished."""
        rows, count = self._rows, len(self._rows)
        positions_B = rows.length_R[:count]
        tokens_B, logprobs_B = self._sampler(self.model.logits(hidden_B_D), rows.sampling, positions_B)
        self._decode_tokens += count
        failed_B = ~np.isfinite(logprobs_B)
        done_B_2 = rows.append(tokens_B, logprobs_B, self.version)
        leaving: dict[Sequence, tuple[FinishReason, str]] = {}
        for row in np.flatnonzero(failed_B | done_B_2.any(axis=1)):
            if failed_B[row]:
                rows.length_R[row] -= 1
                leaving[rows.sequences[row]] = (FinishReason.FAILED, "non-finite logits")
            else:
                reason = FinishReason.STOP if done_B_2[row, 0] else FinishReason.LENGTH
                leaving[rows.sequences[row]] = (reason, "")
        return self._leave(leaving)

    def _leave(self, leaving: dict[Sequence, tuple[FinishReason, str]]) -> list[Rollout]:
        """Rollouts leave the engine with everything they hold."""
        for sequence in leaving:
            if sequence.row >= 0:
                self._rows.remove(sequence)
        self._scheduler.remove(leaving)
        return [sequence.rollout(reason, error) for sequence, (reason, error) in leaving.items()]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device, non_blocking=True)


def _bad_sampling(params: SamplingParams) -> str:
    """What is wrong with sampling parameters; empty when nothing is. Written so that NaN is wrong."""
    if not 0 <= params.temperature < float("inf"):
        return f"temperature = {params.temperature}; it must be 0 (greedy) or a positive number"
    if not 0 < params.top_p <= 1:
        return f"top_p = {params.top_p}; it must be above 0 and at most 1"
    if params.top_k < 0:
        return f"top_k = {params.top_k}; it must be 0 (off) or positive"
    if not 0 <= params.min_p <= 1:
        return f"min_p = {params.min_p}; it must be between 0 and 1"
    if params.max_new_tokens < 1:
        return f"max_new_tokens = {params.max_new_tokens}; it must be at least 1"
    return ""


def _spare_bytes(device: torch.device) -> int:
    """Memory that a KV cache may take when nobody says how much."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
