"""`VllmEngine`: the engine interface over a vLLM server, which runs in a process and an interpreter of its own.

    submit -> one HTTP request per rollout: token ids in, token ids, log-probs and versions out -> step
    subscribe -> fetch (any thread) -> the plugin in vLLM's workers reads published weights while vLLM decodes
    set_version -> pause and keep -> load what was fetched -> resume

What differs from the native engine: noise is vLLM's own, so rollouts do not repeat (its CPU build dies of a seeded
request whose prompt it prefills in chunks); min-p comes before top-p; a stop string that begins before a cut is not
seen.

Shape suffixes: T tokens of one sequence.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.backend import EngineStats, accept, response_limit, unknown_id
from llamarl.models.folder import load_shape
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.parts.vllm.server import CONTROL_TIMEOUT_S, TOKENIZER_FILE, VllmRefused, VllmServer, VllmSettings
from llamarl.types import CandidateSets, FinishReason, GenerationRequest, Rollout, continued
from llamarl.weight_sync.base import Subscriber
from llamarl.weight_sync.layout import Address, TensorSpec

ROLLOUT_TIMEOUT_S = 3600.0
"""Longest wait for a rollout, from when it is sent."""
POLL_S = 0.02
"""`step` waits so long for a rollout to finish."""
FETCH_POLL_S = 0.005
STATS_INTERVAL_S = 0.05
NON_FINITE = "non-finite logits"
NO_LOGPROB = -9999.0
"""Value that vLLM sends in place of a log-probability that is not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _VllmRollout:
    """One rollout on its way."""

    request: GenerationRequest
    partial: Rollout
    """The rollout as far as it has come."""
    limit: int
    """Most tokens, over all segments."""
    request_id: str = ""

    def body(self, salt: str) -> dict[str, Any]:
        """vLLM's `GenerateRequest`. One salt per update: no cached prefix outlives its weights."""
        request, sampling, start = self.request, self.request.sampling, self.partial.num_tokens
        greedy = sampling.temperature == 0
        room = self.limit - start
        return {
            "request_id": self.request_id,
            "token_ids": [*request.prompt_token_ids_T.tolist(), *self.partial.token_ids_T.tolist()],
            "cache_salt": salt,
            "sampling_params": {
                "max_tokens": min(request.segment_tokens or room, room),
                "temperature": sampling.temperature,
                # A greedy rollout reports log-probabilities of the whole distribution.
                "top_p": 1.0 if greedy else sampling.top_p,
                "top_k": 0 if greedy else sampling.top_k,
                "min_p": 0.0 if greedy else sampling.min_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "stop": list(sampling.stop_strings),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": bool(sampling.stop_strings),
                "skip_special_tokens": False,
            },
        }  # fmt: skip

    def rollout(self, choice: Mapping[str, Any]) -> Rollout:
        """The partial and what vLLM added."""
        tokens_T = np.array(choice["token_ids"], np.int32)
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs_T = np.array([entry["logprob"] for entry in content], np.float32)
        spans = choice["weight_versions"] or []
        versions_T = np.repeat([int(s["version"]) for s in spans], [s["end"] - s["start"] for s in spans])
        failed_T = np.flatnonzero(logprobs_T <= NO_LOGPROB)
        count = failed_T[0] if len(failed_T) else len(tokens_T)
        sampled = {
            "token_ids": tokens_T,
            "behavior_logprobs": logprobs_T,
            "policy_versions": versions_T.astype(np.int32),
        }
        partial = self.partial
        whole = replace(
            partial,
            columns=continued(partial.columns, {name: values_T[:count] for name, values_T in sampled.items()}),
            finish_reason=FinishReason.FAILED,
            error="",
        )
        if len(failed_T):
            return replace(whole, error=NON_FINITE)
        return replace(whole, finish_reason=self._reason(choice["finish_reason"], whole.num_tokens))

    def _reason(self, said: str, num_tokens: int) -> FinishReason:
        if said == "length":
            return FinishReason.LENGTH if num_tokens >= self.limit else FinishReason.PARKED
        return {"stop": FinishReason.STOP, "abort": FinishReason.ABORTED}[said]


class VllmEngine:
    """A `GenerationBackend`. Not thread-safe but for its subscribers."""

    keyed_sampling = False

    def __init__(
        self, model_path: str | Path, settings: VllmSettings, version: int = 0, server: VllmServer | None = None
    ) -> None:
        """
        Raises:
            ConfigError: the folder holds no model that the package knows, or there is no such interpreter.
            VllmFailed: the server did not start.
        """
        shape = load_shape(model_path)
        self._context, self._vocab_size = shape.max_position_embeddings, shape.vocab_size
        self._unused_ids = shape.unused_ids
        self._can_decode = (Path(model_path) / TOKENIZER_FILE).is_file()
        self._specs = _specs(shape, settings.dtype)
        self.kv_on_update: Literal["keep", "recompute"] = settings.kv_on_update
        """Fate of keys and values of running rollouts at the next update."""
        self._server = server or VllmServer(model_path, settings)
        # Half of them wait in vLLM, so that a rollout that ends is replaced at once.
        self._max_sent = 2 * settings.max_running
        self._pool = ThreadPoolExecutor(self._max_sent, thread_name_prefix="vllm")
        self._queue = deque[_VllmRollout]()
        self._sent: dict[Future[Any], _VllmRollout] = {}
        self._ready = list[Rollout]()
        self._num_sent = self._num_updates = 0
        self._saw_nan = False
        self._metrics: tuple[float, Counter[str]] = (-1.0, Counter())
        self._server.post("/update_weight_version", {"new_version": str(version)})
        if self._unused_ids:
            spans = json.dumps(self._unused_ids)  # arguments are texts
            self._server.post("/collective_rpc", {"method": "remove_ids", "args": [spans]})

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._sent or self._ready)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        counts = Counter(request.group_id for request in requests)
        counts.update({job.request.group_id for job in (*self._queue, *self._sent.values())} & counts.keys())
        twice = sorted(i for i, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"group ids {twice} are submitted twice; each names one request")
        for request in requests:
            going, refused = accept(
                request,
                context=self._context,
                vocab_size=self._vocab_size,
                can_decode=self._can_decode,
                unused_ids=self._unused_ids,
            )
            self._ready += refused
            limit = response_limit(request, self._context)
            self._queue += [_VllmRollout(request=request, partial=partial, limit=limit) for partial in going]
        self._metrics = (-1.0, Counter())  # what is counted from here on begins at fresh counts

    def step(self) -> list[Rollout]:
        """Sends what there is room for, and waits a moment for rollouts that end."""
        while self._queue and len(self._sent) < self._max_sent:
            self._num_sent += 1
            job = replace(self._queue.popleft(), request_id=str(self._num_sent))
            self._sent[self._pool.submit(self._generate, job, str(self._num_updates))] = job
        if self._sent:
            self._collect(0.0 if self._ready else POLL_S)
        ready, self._ready = self._ready, []
        return ready

    def _generate(self, job: _VllmRollout, salt: str) -> Rollout:
        """Runs in a thread of the pool."""
        try:
            answer = self._server.post("/inference/v1/generate", job.body(salt), ROLLOUT_TIMEOUT_S)
        except VllmRefused as error:
            return replace(job.partial, finish_reason=FinishReason.FAILED, error=str(error))
        return job.rollout(answer["choices"][0])

    def _collect(self, timeout_s: float) -> list[_VllmRollout]:
        """Rollouts that ended go to `_ready`; their jobs."""
        ended, _ = wait(self._sent, timeout_s, FIRST_COMPLETED)
        rollouts = [future.result() for future in ended]
        self._saw_nan |= any(one.error == NON_FINITE for one in rollouts)
        self._ready += rollouts
        return [self._sent.pop(future) for future in ended]

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        """vLLM holds nothing for one rollout."""

    def sleep(self) -> None:
        """Not asked for: `RunConfig.generators_sleep`."""

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        return []

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        wanted = set(group_ids)
        aborted = [
            replace(job.partial, finish_reason=FinishReason.ABORTED)
            for job in self._queue
            if job.request.group_id in wanted
        ]
        self._queue = deque(job for job in self._queue if job.request.group_id not in wanted)
        deadline_s = time.monotonic() + CONTROL_TIMEOUT_S
        # Again and again: vLLM ignores an id that it has not met yet.
        while ids := [
            f"generate-tokens-{job.request_id}" for job in self._sent.values() if job.request.group_id in wanted
        ]:
            if time.monotonic() > deadline_s:
                self._server.fail(f"did not abort {len(ids)} rollouts within {CONTROL_TIMEOUT_S:.0f} s")
            self._server.post("/abort_requests", {"request_ids": ids})
            self._collect(POLL_S)
        aborted += [one for one in self._ready if one.group_id in wanted and one.finish_reason == FinishReason.ABORTED]
        self._ready = [one for one in self._ready if one.finish_reason != FinishReason.ABORTED]
        return aborted

    def specs(self) -> tuple[TensorSpec, ...]:
        """Parameters that vLLM reads, each of them whole; its workers cut it and join what they join."""
        return self._specs

    def subscribe(self, address: Address, specs: Sequence[TensorSpec], rank: int, **options: Any) -> Subscriber:
        """Subscriber for vLLM's workers, opened like `open_subscriber`'s; `set_version` then takes over what came."""
        return VllmSubscriber(self._server, specs, rank, **options)

    def set_version(self, version: int) -> None:
        """Takes over the fetched weights: rollouts stand still meanwhile and then go on with them."""
        recompute = self.kv_on_update == "recompute" or self._saw_nan
        self._server.post(f"/pause?mode=keep&clear_cache={str(recompute).lower()}")
        if self._saw_nan:
            self._server.post("/collective_rpc", {"method": "zero_kv_cache"})
        self._server.post("/start_weight_update")
        self._server.post("/update_weights", {"update_info": {"version": version}})
        self._server.post("/finish_weight_update", {"weight_version": str(version)})
        self._server.post("/resume")
        self._saw_nan = False
        self._num_updates += 1

    def score(self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None) -> list[np.ndarray]:
        assert candidates is None, "the server does not tell causes"
        for token_ids_T in sequences:
            error = unknown_id(token_ids_T, self._vocab_size, self._unused_ids)
            if not len(token_ids_T):
                error = "it is empty"
            if len(token_ids_T) > self._context:
                error = f"it has {len(token_ids_T)} tokens, and the context {self._context}"
            if error:
                raise ValueError(f"a sequence cannot be scored: {error}")
        return [self._score(token_ids_T.tolist()) for token_ids_T in sequences]

    def _score(self, token_ids: list[int]) -> np.ndarray:
        if len(token_ids) == 1:
            return np.empty(0, np.float32)
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
        try:
            answer = self._server.post("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling})
        except VllmRefused as error:
            if "not JSON compliant" not in str(error):
                raise
            self._saw_nan = True
            return np.full(len(token_ids) - 1, np.nan, np.float32)
        found = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return np.array([entry[str(token)]["logprob"] for token, entry in found], np.float32)

    def stats(self) -> EngineStats:
        """vLLM's own counts, up to 0.05 s old."""
        now_s = time.monotonic()
        if now_s - self._metrics[0] > STATS_INTERVAL_S:
            counts = Counter[str]()
            for line in self._server.get("/metrics").decode().splitlines():
                if line.startswith("vllm:"):
                    name, value = line.rsplit(" ", 1)
                    counts[name.split("{")[0].removeprefix("vllm:")] += float(value)  # pyrefly: ignore
            self._metrics = now_s, counts
        counts = self._metrics[1]
        running = int(counts["num_requests_running"])
        return EngineStats(
            running=running,
            waiting=max(len(self._sent) - running, 0) + len(self._queue),
            kv_use=counts["kv_cache_usage_perc"],
            decode_tokens=int(counts["generation_tokens_total"]),
            prefill_tokens=int(counts["prompt_tokens_total"]),
            steps=int(counts["iteration_tokens_total_count"]),
            parked=int(counts["num_preemptions_total"]),
        )

    def close(self) -> None:
        """Stops the server; rollouts on their way are lost."""
        self._server.close()
        self._pool.shutdown()


class VllmSubscriber(Subscriber):
    """Has vLLM's workers fetch. No tensor comes here: they keep what came until `VllmEngine.set_version`."""

    def __init__(self, server: VllmServer, specs: Sequence[TensorSpec], rank: int, delta: bool = False) -> None:
        super().__init__(specs, rank, delta)
        self._server = server

    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        """
        Raises:
            What the transport's subscriber raised in a worker.
            VllmFailed: there is no answer.
        """
        options = {"delta": True} if self._delta else {}
        source = base64.b64encode(pickle.dumps((self.layout.specs, address, options))).decode()
        self._server.post("/init_weight_transfer_engine", {"init_info": {"version": version, "source": source}})
        deadline_s = time.monotonic() + CONTROL_TIMEOUT_S
        while True:
            states = self._server.post("/collective_rpc", {"method": "fetch_state"})["results"]
            if errors := [state["error"] for state in states if state["error"]]:
                raise pickle.loads(base64.b64decode(errors[0]))
            if all(state["version"] == version for state in states):
                self.fingerprint = states[0]["fingerprint"]  # each worker fetches, and proves, the same
                self.received_bytes = sum(state["num_bytes"] for state in states)
                return {}
            stuck = not any(state["fetching"] for state in states)
            if stuck or time.monotonic() > deadline_s:
                self._server.fail(f"did not fetch version {version}, its workers say {states}")
            time.sleep(FETCH_POLL_S)

    def close(self) -> None:
        """The workers close theirs when they open another."""


def _specs(shape: ModelShape, dtype: str) -> tuple[TensorSpec, ...]:
    with torch.device("meta"):
        parameters = Transformer(shape).named_parameters()
    return tuple(TensorSpec.whole(name, parameter.shape, dtype) for name, parameter in parameters)
