"""`VllmEngine`: the engine interface over a vLLM server, which runs in a separate process and interpreter.

    submit -> one HTTP request per rollout: token ids in, token ids, log-probs and versions out -> step
    subscribe -> fetch (any thread) -> the plugin in vLLM's workers reads published weights while vLLM decodes
    set_version -> pause and keep -> load the fetched weights -> resume

Differences from the native engine: vLLM draws the noise, so rollouts are not repeatable (its CPU build crashes on a
seeded request whose prompt is prefilled in chunks); min-p is applied before top-p; a stop string that begins before a
segment boundary is not detected.

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
"""Maximum seconds for a rollout, from sending it."""
POLL_S = 0.02
"""Maximum seconds that `step` waits for a rollout to finish."""
FETCH_POLL_S = 0.005
STATS_INTERVAL_S = 0.05
NON_FINITE = "non-finite logits"
NO_LOGPROB = -9999.0
"""Value that vLLM sends for a log-probability that is not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _VllmRollout:
    """One unfinished rollout."""

    request: GenerationRequest
    partial: Rollout
    """The rollout's tokens so far."""
    limit: int
    """Maximum tokens, over all segments."""
    request_id: str = ""

    def body(self, salt: str) -> dict[str, Any]:
        """Returns vLLM's `GenerateRequest`. The salt changes with each update, so that no cached prefix outlives its
        weights."""
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
                # A greedy rollout reports log-probabilities of the full distribution.
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
        """Returns the partial rollout extended by vLLM's tokens."""
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
    """A `GenerationBackend`. Not thread-safe except for its subscribers."""

    keyed_sampling = False

    def __init__(
        self, model_path: str | Path, settings: VllmSettings, version: int = 0, server: VllmServer | None = None
    ) -> None:
        """
        Raises:
            ConfigError: the folder contains no supported model, or the interpreter does not exist.
            VllmFailed: the server did not start.
        """
        shape = load_shape(model_path)
        self._context, self._vocab_size = shape.max_position_embeddings, shape.vocab_size
        self._unused_ids = shape.unused_ids
        self._can_decode = (Path(model_path) / TOKENIZER_FILE).is_file()
        self._specs = _specs(shape, settings.dtype)
        self.kv_on_update: Literal["keep", "recompute"] = settings.kv_on_update
        """Whether the next update keeps or recomputes the KV cache of running rollouts."""
        self._server = server or VllmServer(model_path, settings)
        # Half of the requests queue in vLLM, so that a finished rollout is replaced at once.
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
            spans = json.dumps(self._unused_ids)  # arguments must be strings
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
        self._metrics = (-1.0, Counter())  # the next counts must be fresh

    def step(self) -> list[Rollout]:
        """Sends requests up to the capacity, and waits briefly for rollouts to finish."""
        while self._queue and len(self._sent) < self._max_sent:
            self._num_sent += 1
            job = replace(self._queue.popleft(), request_id=str(self._num_sent))
            self._sent[self._pool.submit(self._generate, job, str(self._num_updates))] = job
        if self._sent:
            self._collect(0.0 if self._ready else POLL_S)
        ready, self._ready = self._ready, []
        return ready

    def _generate(self, job: _VllmRollout, salt: str) -> Rollout:
        """Generates one rollout, in a thread of the pool."""
        try:
            answer = self._server.post("/inference/v1/generate", job.body(salt), ROLLOUT_TIMEOUT_S)
        except VllmRefused as error:
            return replace(job.partial, finish_reason=FinishReason.FAILED, error=str(error))
        return job.rollout(answer["choices"][0])

    def _collect(self, timeout_s: float) -> list[_VllmRollout]:
        """Moves finished rollouts to `_ready`. Returns their jobs."""
        ended, _ = wait(self._sent, timeout_s, FIRST_COMPLETED)
        rollouts = [future.result() for future in ended]
        self._saw_nan |= any(one.error == NON_FINITE for one in rollouts)
        self._ready += rollouts
        return [self._sent.pop(future) for future in ended]

    def release(self, rollouts: Iterable[tuple[int, int]]) -> None:
        """Does nothing: vLLM holds no state for a single rollout."""

    def sleep(self) -> None:
        """Never called: `RunConfig.generators_sleep` is False."""

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
        # Repeated, because vLLM ignores an id that it has not seen yet.
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
        """Parameters that vLLM reads, unsharded. Its workers shard and fuse them."""
        return self._specs

    def subscribe(self, address: Address, specs: Sequence[TensorSpec], rank: int, **options: Any) -> Subscriber:
        """Returns a subscriber for vLLM's workers, with the arguments of `open_subscriber`. `set_version` loads what it
        fetched."""
        return VllmSubscriber(self._server, specs, rank, **options)

    def set_version(self, version: int) -> None:
        """Loads the fetched weights. Rollouts pause meanwhile and then continue with the new weights."""
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
        """Returns vLLM's counters, at most 0.05 s old."""
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
        """Stops the server. Unfinished rollouts are lost."""
        self._server.close()
        self._pool.shutdown()


class VllmSubscriber(Subscriber):
    """Makes vLLM's workers fetch. They keep the tensors until `VllmEngine.set_version`."""

    def __init__(self, server: VllmServer, specs: Sequence[TensorSpec], rank: int, delta: bool = False) -> None:
        super().__init__(specs, rank, delta)
        self._server = server

    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        """
        Raises:
            Any error that the transport's subscriber raised in a worker.
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
                self.fingerprint = states[0]["fingerprint"]  # every worker fetches and verifies the same bytes
                self.received_bytes = sum(state["num_bytes"] for state in states)
                return {}
            stuck = not any(state["fetching"] for state in states)
            if stuck or time.monotonic() > deadline_s:
                self._server.fail(f"did not fetch version {version}, its workers say {states}")
            time.sleep(FETCH_POLL_S)

    def close(self) -> None:
        """Does nothing: the workers close their subscriber when they open another."""


def _specs(shape: ModelShape, dtype: str) -> tuple[TensorSpec, ...]:
    with torch.device("meta"):
        parameters = Transformer(shape).named_parameters()
    return tuple(TensorSpec.whole(name, parameter.shape, dtype) for name, parameter in parameters)
