"""`Engine`: continuous batching of rollouts, one token each per step.

    submit -> Scheduler.schedule -> [parked rows leave, new rows join] -> forward -> Sampler -> finished rollouts leave

One step is one forward over packed tokens: the next token of every running rollout, then up to `prefill_tokens` of
prompts. Weights may be swapped between two steps, and each token carries the version that sampled it. `Scheduler`
decides what happens to the KV cache then. A parked rollout prefills its tokens again when it resumes, here or in
another engine, with the weights of that moment.

Shape suffixes: T tokens of one sequence, B running rollouts, N packed tokens, J kv heads, D model dim, V vocabulary.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.config.ref import part
from llamarl.config.section import ALONE
from llamarl.generation.attention import (
    BLOCK_SIZE,
    KernelAttention,
    KVCache,
    StepGraphs,
    StepInputs,
    TorchAttention,
    backend_name,
    gather_inputs,
    new_routes,
)
from llamarl.generation.backend import EngineModel, EngineStats, accept, failed, response_limit, same
from llamarl.generation.launched import Launched
from llamarl.generation.model import GeneratorModel
from llamarl.generation.routes import Routes
from llamarl.generation.rows import Rows
from llamarl.generation.sampler import Drawn, Sampler, score, truncated
from llamarl.generation.scheduler import EMPTY, BlockPool, Chunk, Group, Schedule, Scheduler, Sequence, StopStrings
from llamarl.generation.states import StateCache, StepStates
from llamarl.kernels import delta, gpu
from llamarl.models.memory import SHARED_STATES, STATES_OF_ROLLOUT, gpu_work_bytes
from llamarl.models.transformer import Attend
from llamarl.types import CandidateSets, FinishReason, GenerationRequest, Rollout

_WORK_SHARE = 0.05
"""Smallest share of a GPU's memory that is left to activations, CUDA graphs and libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Sizes and modes of an engine."""

    max_running: int
    """Rollouts that decode at once."""
    prefill_tokens: int
    """Largest number of prompt tokens in one step."""
    kv_bytes: int | None
    """Memory for keys and values. None means what `max_running` full contexts need, but at most a quarter of the
    machine's memory (CPU), or nine tenths of the free memory next to a second set of weights (GPU), half if other
    processes share the device."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to keys and values when the weights change. "keep" costs nothing. "recompute" prefills every token
    again, so rollouts continue as if the new weights had seen all of it."""
    graphs: bool | None = None
    """Decode by CUDA graphs. None means on GPUs on which the Triton kernels run."""
    records_routes: bool = True
    """Whether rollouts of a mixture record the experts that computed them."""
    asleep: bool = False
    """Take no memory until weights are replaced."""
    beside_bytes: int = 0
    """Memory that other executors on the device will take later while this engine works."""
    goes_ahead: bool | None = None
    """Whether a step by graphs is launched before the tokens of the step before are read. None means on GPUs."""


class Engine:
    """A `GenerationBackend`: one model on one device. Not thread-safe: use it from one thread."""

    keyed_sampling = True

    def __init__(
        self,
        model: EngineModel,
        settings: EngineSettings,
        *,
        version: int = 0,
        decode: Callable[[Ordered[int]], str] | None = None,
    ) -> None:
        """
        Args:
            version: policy version of the model's weights.
            decode: turns tokens into text. Only stop strings need it.
        """
        self.model = model
        self.version = version
        self._context = model.shape.max_position_embeddings
        self._settings = settings
        self._no_graphs_because = model.no_graphs_because if isinstance(model, GeneratorModel) else ""
        moe = model.shape.moe if isinstance(model, GeneratorModel) and settings.records_routes else None
        self._routes = Routes(moe) if moe is not None else None
        has_states = model.shape.delta is not None
        shares_prefixes = self._routes is None  # a group records the experts of its whole prompt
        self._scheduler = Scheduler(
            0,
            BLOCK_SIZE,
            settings.max_running,
            settings.prefill_tokens,
            shares_prefixes=shares_prefixes,
            has_states=has_states,
        )
        self._scheduler.version = version
        widths = (self._routes.width, self._routes.dtype) if self._routes else None
        self._rows = Rows(settings.max_running, BLOCK_SIZE, widths)
        self._sampler = Sampler(model.device)
        self._cache: KVCache | None = None
        """None means that the engine sleeps."""
        self._states: StateCache | None = None
        """None means that it sleeps, or that the model has no delta nets."""
        self._graphs: StepGraphs | None = None
        self._goes_ahead = model.device.type == "cuda" if settings.goes_ahead is None else settings.goes_ahead
        self._ahead: Launched | None = None
        """A step that was launched before its tokens were needed."""
        if not settings.asleep:
            self.wake()
        self._refused: list[Rollout] = []
        self._recompute = settings.kv_on_update == "recompute"
        # Kept between groups: they remember which tokens can end a string.
        self._stop_strings = lru_cache(maxsize=16)(partial(StopStrings, decode=decode)) if decode else None
        self._decode_tokens = self._prefill_tokens = self._steps = 0
        self._recomputed_tokens = self._slot_steps = self._filled_slot_steps = 0
        self._recompute_s = 0.0

    def describe(self) -> str:
        """Returns text for the log: which kernels compute, or torch and the reason."""
        if self._cache is None:
            return "asleep until weights come"
        weights = getattr(self.model, "multiplies_by", "torch")
        graphs = ", decode steps by CUDA graphs" if self._graphs else ""
        if self._no_graphs_because:
            graphs = f", without CUDA graphs ({self._no_graphs_because})"
        nets = f", delta nets by {delta.backend_name(self.model.device)}" if self._states is not None else ""
        return f"weights by {weights}, attention by {backend_name(self._cache)}{nets}{graphs}"

    def sleep(self) -> None:
        """Frees the memory of weights, keys, values and graphs until weights are replaced. There must be no work. Held
        rollouts lose their KV cache."""
        assert not self.has_work, "rollouts decode here"
        self._scheduler.evict(list(self._scheduler.held))
        self._cache = self._states = self._graphs = None
        if isinstance(self.model, GeneratorModel):
            self.model.sleep()
        if self.model.device.type == "cuda":  # for other processes
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocates memory for keys and values, always the same amount. Raises ConfigError: there is too little."""
        if self._cache is not None:
            return
        model, scheduler = self.model, self._scheduler
        if not scheduler.pool.num_blocks:
            kv_bytes = self._settings.kv_bytes
            if kv_bytes is None:
                beside = self._settings.beside_bytes if self._settings.asleep else None
                kv_bytes = kv_budget(
                    model, scheduler.max_running, sleeps_beside=beside, prefill_tokens=scheduler.prefill_tokens
                )
            scheduler.pool = BlockPool(kv_bytes // KVCache.block_bytes(model.shape, model.kv_dtype))
        num_blocks, graphs = scheduler.pool.num_blocks, self._settings.graphs
        if graphs is None:
            has_kernels = gpu.kernel("decode", model.device) is not None and isinstance(model, GeneratorModel)
            graphs = has_kernels and not self._no_graphs_because
        if model.shape.delta is not None and scheduler.slots is not None:
            num_slots = EMPTY + 1 + SHARED_STATES + scheduler.slots.num_blocks
            self._states = StateCache(model.shape.delta, num_slots, model.device)
        self._cache = KVCache(
            num_layers=model.shape.num_attention_layers, num_blocks=num_blocks + graphs,
            num_kv_heads=model.shape.num_kv_heads, head_dim=model.shape.head_dim, dtype=model.kv_dtype,
            device=model.device,
        )  # fmt: skip
        if graphs:
            assert isinstance(model, GeneratorModel), "graphs run a model made for generation"
            self._graphs = part("cuda", "decode_graphs")(model, self._cache, num_blocks, scheduler.max_running)

    def add_states(self) -> None:
        """Doubles the number of states of delta nets, for a replay, which holds more rollouts than decode at once."""
        slots = self._scheduler.slots
        assert slots is not None, "the model has no states"
        assert self._states is not None, "it sleeps"
        self._states.widen(slots.num_blocks)
        slots.widen(slots.num_blocks)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.active or self._refused)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queues requests, first in, first out. A request that raises ends as FAILED rollouts."""
        requests = list(requests)
        self._check_new(requests)
        for request in requests:
            try:
                self._submit(request)
            except Exception as error:  # other requests decode here
                text = f"{type(error).__name__}: {error}"
                self._refused += [failed(request, index, text) for index in request.indices]

    def _submit(self, request: GenerationRequest) -> None:
        siblings = self._siblings(request)
        starts, refused = accept(
            request,
            context=self._context,
            vocab_size=self.model.shape.vocab_size,
            can_decode=self._stop_strings is not None,
            is_known=siblings is not None,
            unused_ids=self.model.shape.unused_ids,
        )
        if siblings:
            self._scheduler.join(siblings, [self._sequence(siblings, start) for start in starts])
        elif starts:
            self._enqueue(request, starts)
        self._refused += refused

    def _sequence(self, group: Group, start: Rollout) -> Sequence:
        return self._routes.sequence(group, start) if self._routes else Sequence.of(group, start)

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        self._drop_ahead()
        groups, group_ids = self._scheduler.groups, set(group_ids)
        self._scheduler.evict([key for key in self._scheduler.held if key[0] in group_ids])
        aborted = [rollout for i in group_ids if i in groups for rollout in groups[i].unfinished.values()]
        return self._leave(dict.fromkeys(aborted, (FinishReason.ABORTED, "")))

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Returns copies of the rollouts of these groups that decode now."""
        groups = (self._scheduler.groups[i] for i in group_ids if i in self._scheduler.groups)
        decoding = [sequence for group in groups for sequence in group.unfinished.values() if sequence.row >= 0]
        return [replace(each.rollout(FinishReason.PARKED), columns=self._rows.so_far(each)) for each in decoding]

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        self._scheduler.evict(rollouts)

    def set_version(self, version: int) -> None:
        self._drop_ahead()
        self.wake()
        self.version = self._scheduler.version = version
        for sequence in self._scheduler.outdate(self._recompute):
            self._rows.remove(sequence)

    def graph_state(self) -> tuple[int, ...]:
        """Returns `StepGraphs.state`. Empty without graphs."""
        return self._graphs.state() if self._graphs else ()

    def score(self, sequences: Ordered[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        return score(self.model, sequences, candidates)

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """Samples one token for each running rollout and prefills some. Returns the rollouts that leave.

        On a GPU the next step is launched before the tokens of this one are read, if it only decodes. What it computes
        for rollouts that leave is dropped.
        """
        finished, self._refused = self._refused, []
        start_s, plan, launched, self._ahead = time.perf_counter(), Schedule(), self._ahead, None
        if launched is None:
            plan = self._scheduler.schedule()
            self._join_rows(plan)
        count = len(self._rows)
        if self._scheduler.waiting:
            self._slot_steps += self._scheduler.max_running
            self._filled_slot_steps += count
        if not count and not plan.chunks:
            return finished
        self._steps += 1
        launched = launched or self._launch(plan.chunks)
        if self._can_go_ahead():
            self._join_rows(self._scheduler.schedule())
            self._ahead = self._launch([], after=launched)
        drawn, routes_N_W = launched.read(self._rows.sequences)
        if self._routes and routes_N_W is not None:
            self._routes.prefilled(self._rows, plan.chunks, routes_N_W[count:])
            self._routes.begun(plan.joined)
        if drawn:
            finished += self._append(drawn, None if routes_N_W is None else routes_N_W[:count])
        self._recomputed_tokens += plan.recomputed_tokens
        self._recompute_s += (time.perf_counter() - start_s) * plan.recomputed_tokens / launched.num_tokens
        if not len(self._rows):
            self._ahead = None
        return finished

    def _launch(self, chunks: list[Chunk], after: Launched | None = None) -> Launched:
        """Computes a step, on a GPU without waiting for it.

        Args:
            after: the step before, if its tokens are not known yet.
        """
        rows, count = self._rows, len(self._rows)
        result, settings_5_B, routes_N_W, is_drawn = self._forward(chunks, after)
        drawn = None
        if count and settings_5_B is None:
            drawn = self._sampler(self.model.logits(result[:count]), rows.sampling, rows.length_R[:count])
        elif count:
            assert settings_5_B is not None
            drawn = result if is_drawn else self._sampler.launch(
                self.model.logits(result[:count]), rows.sampling, settings_5_B
            )  # fmt: skip
            if self._graphs and not is_drawn:
                self._graphs.feed(drawn)
        num_tokens = count + sum(chunk.stop - chunk.start for chunk in chunks)
        return Launched(drawn, routes_N_W, list(rows.sequences), num_tokens)

    def _can_go_ahead(self) -> bool:
        """Returns True if the next step can be launched before the tokens of this one are known."""
        rows, count = self._rows, len(self._rows)
        if not (self._goes_ahead and self._graphs and count):
            return False
        has_room = bool((rows.length_R[:count] + 1 < rows.limit_R[:count]).all())
        draws = not truncated(rows.sampling.params_R_4[:count]).any()
        return has_room and self._scheduler.only_decodes() and self._graphs.is_ready(count, bool(draws))

    def _drop_ahead(self) -> None:
        """Forgets the step that was launched ahead: it is computed again, with the weights and rollouts of then."""
        if self._ahead is not None:
            self._scheduler.unschedule(one for one in self._ahead.sequences if one.row >= 0)
            self._ahead = None

    def stats(self) -> EngineStats:
        pools = [pool for pool in (self._scheduler.pool, self._scheduler.slots) if pool is not None]
        return EngineStats(
            running=len(self._rows),
            waiting=len(self._scheduler.waiting),
            kv_use=max(pool.use for pool in pools),
            decode_tokens=self._decode_tokens,
            prefill_tokens=self._prefill_tokens,
            steps=self._steps,
            parked=self._scheduler.num_parked,
            recomputed_tokens=self._recomputed_tokens,
            recompute_s=self._recompute_s,
            slot_steps=self._slot_steps,
            filled_slot_steps=self._filled_slot_steps,
        )

    def _check_new(self, requests: Iterable[GenerationRequest]) -> None:
        """Raises ValueError, before anything is queued, if a rollout is in the engine already."""
        groups = self._scheduler.groups
        taken = defaultdict[int, set[int]](set)
        for request in requests:
            group_id, indices = request.group_id, set(request.indices)
            if group_id in groups:
                taken[group_id] |= groups[group_id].unfinished.keys()
            if repeated := sorted(indices & taken[group_id]):
                raise ValueError(f"rollouts {repeated} of group {group_id} are submitted twice")
            taken[group_id] |= indices

    def _siblings(self, request: GenerationRequest) -> Group | None:
        """Returns the group of the request if it is in the engine or held."""
        siblings = self._scheduler.groups.get(request.group_id)
        if siblings and not siblings.unfinished and not same(siblings.request, request):
            self.abort([request.group_id])
            return None
        return siblings

    def _enqueue(self, request: GenerationRequest, starts: list[Rollout]) -> None:
        """Queues the rollouts of a new group if one of them fits into the KV cache."""
        prompt_T = np.array(request.prompt_token_ids_T, np.int32)
        strings = request.sampling.stop_strings
        group = Group(
            request=request,
            prompt_T=prompt_T,
            limit=response_limit(request, self._context),
            stop_strings=self._stop_strings(strings) if self._stop_strings and strings else None,
        )
        # The fed own tokens are the last prompt token and the response without its last token.
        if not self._scheduler.fits(group.prefix_tokens, group.limit):
            tokens = self._scheduler.pool.num_blocks * BLOCK_SIZE
            error = (
                f"the KV cache holds {tokens} tokens, too few for a prompt of {len(prompt_T)} and a response of "
                f"{group.limit}; raise the KV budget or lower max_new_tokens"
            )
            self._refused += [failed(request, start.index, error) for start in starts]
            return
        group.unfinished = {start.index: self._sequence(group, start) for start in starts}
        self._scheduler.add(group)

    def _join_rows(self, plan: Schedule) -> None:
        for sequence in plan.parked:
            if sequence.row >= 0:
                self._rows.remove(sequence)
        for sequence in plan.grown:
            self._rows.grow(sequence)
        for sequence in plan.joined:
            self._rows.add(sequence)
        if plan.new_blocks and self._cache:
            self._cache.clear(plan.new_blocks)

    def _forward(
        self, chunks: list[Chunk], after: Launched | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
        """Returns hidden states of the running rows, then of the chunks, or drawn tokens; sampling settings, if they
        are on the device; the experts of all tokens, if they are recorded; and whether the first are drawn tokens."""
        rows, count, cache = self._rows, len(self._rows), self._cache
        assert cache is not None, "it sleeps"
        ahead = int(after is not None)
        own_B = rows.length_R[:count] + ahead
        token_ids = [rows.input_R[:count] if after is None else -1 - after.order(rows.sequences)]
        positions = [rows.position_R[:count] + ahead]
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
        of_tokens = [np.concatenate(parts) for parts in (token_ids, positions, blocks, offsets)]
        if cache.library is not None:
            attend = KernelAttention(cache, rows, chunks, *of_tokens[2:])
            attend.recur = self._step_states(chunks)
            token_N, position_N = map(torch.from_numpy, of_tokens[:2])
            return *self._computed(token_N, position_N, attend, None), False
        if self._graphs and not chunks:
            draws = not truncated(rows.sampling.params_R_4[:count]).any()
            result, settings_5_B = self._graphs(rows, of_tokens, bool(draws), ahead)
            return result, settings_5_B, self._graphs.routes_B_W if self._routes else None, bool(draws)
        array = gather_inputs(rows, of_tokens, self.model.device).to(self.model.device, non_blocking=True)
        inputs = StepInputs(array, len(of_tokens[0]), count)
        attend = TorchAttention(cache, inputs, chunks)
        attend.recur = self._step_states(chunks)
        return *self._computed(inputs.token_N, inputs.position_N, attend, inputs.settings_5_B), False

    def _step_states(self, chunks: list[Chunk]) -> StepStates | None:
        return None if self._states is None else StepStates(self._states, self._rows, chunks)

    def _computed(
        self, token_N: Tensor, position_N: Tensor, attend: Attend, settings_5_B: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the first results of `_forward`, without a graph."""
        if not self._routes:
            return self.model(token_N, position_N, attend), settings_5_B, None
        assert isinstance(self.model, GeneratorModel)
        routes_N_W = new_routes(self.model.shape, len(token_N), self.model.device)
        return self.model(token_N, position_N, attend, routes_N_W), settings_5_B, routes_N_W

    def _append(self, drawn: Drawn, routes_B_W: np.ndarray | None = None) -> list[Rollout]:
        """Appends a token to every running rollout. Returns the rollouts that leave."""
        rows, count = self._rows, len(self._rows)
        assert len(drawn.token_ids_B) == count
        self._decode_tokens += count
        failed_B = ~np.isfinite(drawn.logprobs_B)
        done_B_2 = rows.append(drawn, self.version, routes_B_W)
        leaving: dict[Sequence, tuple[FinishReason, str]] = {}
        for row in np.flatnonzero(failed_B | done_B_2.any(axis=1)):
            if failed_B[row]:
                rows.length_R[row] -= 1
                leaving[rows.sequences[row]] = (FinishReason.FAILED, "non-finite logits")
            else:
                whole = rows.length_R[row] == rows.sequences[row].group.limit
                reason = FinishReason.LENGTH if whole else FinishReason.PARKED
                reason = FinishReason.STOP if done_B_2[row, 0] else reason
                leaving[rows.sequences[row]] = (reason, "")
        return self._leave(leaving)

    def _leave(self, leaving: dict[Sequence, tuple[FinishReason, str]]) -> list[Rollout]:
        """Removes rollouts from the engine with everything that they hold."""
        if not leaving:  # the usual case
            return []
        if self._ahead is not None:  # their next token is being computed, and is dropped
            self._scheduler.unschedule(leaving)
        for sequence in leaving:
            if sequence.row >= 0:
                self._rows.remove(sequence)
        stopped = (sequence for sequence, (reason, _) in leaving.items() if reason is FinishReason.STOP)
        self._scheduler.remove(leaving, {sequence for sequence in stopped if sequence.group.request.has_turns})
        return [sequence.rollout(reason, error) for sequence, (reason, error) in leaving.items()]


def kv_budget(
    model: EngineModel,
    max_running: int,
    num_ranks: int = 1,
    sleeps_beside: int | None = None,
    prefill_tokens: int = 0,
) -> int:
    """Returns bytes for keys and values of this rank, if the configuration sets none.

    Tensor-parallel ranks agree on the least of theirs. On a CPU they share the memory that bounds it.

    Args:
        sleeps_beside: bytes that other executors on the device take later while this one works. It frees all memory
            while they work. None means that it never sleeps.

    Raises:
        ConfigError: a GPU is too small for new weights next to those in use.
    """
    shape, device = model.shape, model.device
    full = max_running * -(-shape.max_position_embeddings // BLOCK_SIZE) * KVCache.block_bytes(shape, model.kv_dtype)
    states = (STATES_OF_ROLLOUT * max_running + SHARED_STATES) * shape.state_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        weights = sum(spec.num_bytes for spec in model.specs()) if isinstance(model, GeneratorModel) else 0
        work = max(_WORK_SHARE * total, float(gpu_work_bytes(shape, max_running, prefill_tokens, num_ranks)))
        reserved = int(work) + states + (int(1.1 * weights) if sleeps_beside is None else sleeps_beside)
        if free <= reserved:
            raise ConfigError(
                f"{free / 1e9:.3g} GB of {device} are free, but {reserved / 1e9:.3g} GB are needed for new weights and "
                "for work; use more generator.tensor_parallel or a smaller generator.dtype"
            )
        # Other processes on the device may take more memory later than they hold now.
        is_alone = os.environ.get(ALONE) or sleeps_beside is not None
        return min(full, int((free - reserved) * (0.9 if is_alone else 0.5)))
    return min(full, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // num_ranks)
