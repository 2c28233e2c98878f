"""`Telemetry` turns the events of a run into metrics, a view for the screen, and accounts at the end.

`SourceTallies` does that for each source of a mixture.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, HostStatus, MeshFailed
from llamarl.config import RunConfig
from llamarl.controller.progress import Progress, SyncReport
from llamarl.executors.replies import GeneratorStats, Replied
from llamarl.observability.metrics import SOURCES, EvalMetrics, StepMetrics
from llamarl.observability.report import Accounts, account, verdict
from llamarl.observability.screen import CompletionView, ExecutorView, RunView, Screen
from llamarl.observability.sinks import EventLog, Flow, MetricsLog
from llamarl.observability.spans import MAX_IN_METRICS, Span, SpanTable, by_kind, now_s
from llamarl.training.packing import is_flat
from llamarl.training.result import PolicyStepResult
from llamarl.types import RAISED, FinishReason, Outcome, Rollout, RolloutGroup
from llamarl.weight_sync.select import Selection

POLL_INTERVAL_S = 0.5
MAX_POLLS_PER_S = 200
"""Status calls to all executors together. A thousand executors are polled every five seconds."""
RECENT_STEPS = 10
"""Steps over which the ETA, the busy shares and the verdict of a step are computed."""
MAX_SPANS = 200_000
"""Spans kept per executor, for the accounts and the trace."""
NAN = float("nan")


class EnvironmentUse(NamedTuple):
    """Use of the environment by all episodes so far."""

    wait_s: float = 0.0
    """Seconds that rollouts waited for replies, summed over rollouts."""
    calls: int = 0
    """Tool calls."""
    errors: int = 0
    """Tool calls that were malformed or failed."""

    def plus(self, waited_s: float, calls: int, errors: int) -> EnvironmentUse:
        """Returns the use with one more reply."""
        return EnvironmentUse(self.wait_s + waited_s, self.calls + calls, self.errors + errors)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMark:
    """Totals at the end of a step."""

    ended_s: float
    resumed_segments: int
    """Partial rollouts that were continued."""
    generators: GeneratorStats
    controller_cpu_s: float
    """Processor seconds of this process."""
    calls: int
    """Calls to executors."""
    environment: EnvironmentUse
    dropped_groups: int
    """Groups that were replaced since their rewards were all equal."""
    journal_s: float
    """Seconds spent on the journal."""


class GeneratorTotals(Protocol):
    """Totals of all generators; `Replicas` has them."""

    num_resumed: int

    @property
    def stats(self) -> GeneratorStats: ...


class Telemetry:
    """Polls the executors, and records steps, evaluations and warnings.

    Example::

        telemetry = Telemetry(config, screen, MetricsLog(folder.metrics, on_failure), staleness_limit=2)
        telemetry.attach(executors, replicas, progress)
        supervisor.start(telemetry.poll_loop(), "status")
        telemetry.step(groups, result, telemetry.mark(), sync_report, ready_groups=3)   # a row of metrics.jsonl
    """

    def __init__(
        self,
        config: RunConfig,
        screen: Screen,
        log: MetricsLog,
        staleness_limit: int,
        clock: Callable[[], float] = now_s,
        events: EventLog | None = None,
    ) -> None:
        """
        Args:
            clock: clock of the executors' spans; the simulator has its own.
        """
        self._events, self.flow = events, Flow(clock, events)
        self._config = config
        self._clock = clock
        self._screen = screen
        self._log = log
        self._staleness_limit = staleness_limit
        self.progress = Progress()
        self._handles = list[ExecutorHandle]()
        self._generators: GeneratorTotals | None = None
        self._status = dict[str, tuple[HostStatus, float]]()
        """Last status of each executor, and its time on `clock`."""
        self._status_s = dict[str, float]()
        """Time of each executor's last status, on the event loop's clock."""
        self.transports = list[Selection]()
        """Selected transports of weights: to generators on the trainer's host, and to others."""
        self.spans = dict[str, SpanTable]()
        self._marks = deque[StepMark](maxlen=RECENT_STEPS + 1)
        self._view = RunView(step=0)
        self.started_s = self._clock()
        self.first_step_ended_s = NAN
        self.first_step = 1
        self.num_samples, self.num_invalid = 0, 0
        self.staleness_max = 0
        labels = (source.label for source in config.data.sources)
        self.sources = SourceTallies(labels, mask_truncated=config.shaping.mask_truncated)
        self._dropped_groups = 0
        self._environment = EnvironmentUse()
        self._calls_of_removed = 0
        self.stalls_s = list[float]()
        self.warnings = list[str]()
        self._in_loop = False

    def attach(self, handles: Sequence[ExecutorHandle], generators: GeneratorTotals, progress: Progress) -> None:
        """Connects the executors of the run, once they have started."""
        self._handles, self._generators, self.progress = list(handles), generators, progress
        self.spans = {handle.name: SpanTable(MAX_SPANS) for handle in handles}

    def chose_transport(self, selection: Selection) -> None:
        """Notes a selected transport, and shows the speed of each candidate."""
        self.transports.append(selection)
        for line in selection.table():
            self._screen.phase(f"weight sync{'' if selection.same_host else ' across hosts'}  {line}")
        if selection.warning:
            self.warn(selection.warning)

    @property
    def transport_speeds(self) -> dict[str, float]:
        """Bytes per second of each transport that was tried, by the name of the metric."""
        return {
            f"{'' if selection.same_host else 'across_hosts_'}{trial.transport}_bytes_per_s": trial.bytes_per_s
            for selection in self.transports
            for trial in selection.measurements
        }

    def joined(self, handle: ExecutorHandle) -> None:
        """Adds an executor that started during the run."""
        self._handles.append(handle)
        self.spans[handle.name] = SpanTable(MAX_SPANS)

    def left(self, handle: ExecutorHandle) -> None:
        """Removes an executor. Its spans stay in the accounts."""
        self._handles.remove(handle)
        self._calls_of_removed += handle.num_calls
        self._status.pop(handle.name, None)
        self._status_s.pop(handle.name, None)

    def usages(self, limit: int | None = None) -> dict[str, float]:
        """Returns memory, descriptors and threads of the controller and of up to `limit` executors, by metric. None
        means all."""
        return by_kind({name: status.usage for name, (status, _) in self._status.items()}, limit)

    def silent_s(self, handle: ExecutorHandle) -> float:
        """Returns the seconds since an executor's last status, or 0 before the first."""
        now_s = asyncio.get_running_loop().time()
        return now_s - self._status_s.get(handle.name, now_s)

    def resume_at(self, step: int) -> None:
        """Drops rows of later steps from the metrics, since the run takes these steps again."""
        self._log.drop_after(step)

    def begin_loop(self, step: int) -> None:
        """Notes that training begins after `step` completed steps."""
        self._in_loop, self.first_step = True, step + 1
        self.started_s = self._clock()
        self._marks.append(self.mark())
        self._show(step=step)

    def end_loop(self) -> None:
        self._in_loop = False

    @property
    def _poll_interval_s(self) -> float:
        return max(POLL_INTERVAL_S, len(self._handles) / MAX_POLLS_PER_S)

    async def poll_loop(self) -> None:
        """Consumes the statuses of all executors; waits for these, then for time; produces heartbeats, spans and the
        view; unblocked by answers, or their deadline."""
        while True:
            await self.poll()
            await asyncio.sleep(self._poll_interval_s)

    async def poll(self) -> None:
        """Polls all executors once. The screen shows the age of a missing answer; the supervisor handles deaths."""
        await asyncio.gather(*(self._poll_one(handle) for handle in self._handles))
        if self._events:
            self._events.flush()
        if self._in_loop:
            self._show()

    async def _poll_one(self, handle: ExecutorHandle) -> None:
        try:
            for status in await handle.status_each(timeout_s=5.0):
                self.spans[handle.name].extend(status.spans)
                if self._events:
                    self._events.add_spans(handle.name, status.spans)
                self._status[handle.name] = (status, self._clock())
                self._status_s[handle.name] = asyncio.get_running_loop().time()
        except (CallTimeout, MeshFailed):
            return

    async def describe_executors(self) -> list[str]:
        """Returns texts for a stall report: what each executor does."""
        lines = []
        for handle in self._handles:
            try:
                status = await handle.status(timeout_s=2.0)
                lines.append(f"{handle.name} (pid {status.pid}): {status.doing} for {status.doing_age_s:.0f} s")
            except ExecutorError as error:
                lines.append(f"{handle.name} does not answer: {type(error).__name__}")
        return lines

    def mark(self, journal_s: float = 0.0) -> StepMark:
        """Returns the totals so far, for the end of a step."""
        assert self._generators is not None
        return StepMark(
            ended_s=self._clock(),
            resumed_segments=self._generators.num_resumed,
            generators=self._generators.stats,
            controller_cpu_s=time.process_time(),
            calls=self._calls_of_removed + sum(handle.num_calls for handle in self._handles),
            dropped_groups=self._dropped_groups,
            journal_s=journal_s,
            environment=self._environment,
        )

    @property
    def completions(self) -> tuple[CompletionView, ...]:
        """A few responses of the last step."""
        return self._view.completions

    def groups_ready(self, count: int, num_dropped: int) -> None:
        """Notes how many groups are ready for the trainer, and how many more were dropped."""
        self._dropped_groups += num_dropped
        self._view = replace(self._view, groups_ready=count)

    def waited(self, seconds: float, replied: Replied | None = None) -> None:
        """Notes that a rollout waited for its environment."""
        calls, errors = replied.calls if replied else (0, 0)
        self._environment = self._environment.plus(seconds, calls, errors)
        if replied:
            self.spans["environment"].extend([Span("reply", now_s() - replied.seconds, now_s())])

    def adopted(self, stall_s: float) -> None:
        """Notes that a generator adopted weights, for which it paused `stall_s`."""
        self.stalls_s.append(stall_s)

    def eval_progress(self, done: int, total: int) -> None:
        if not self._in_loop:
            self._screen.phase("evaluating on held-out problems", done, total)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Records an evaluation of a held-out set."""
        self._log.log(metrics)
        self._view = replace(self._view, evals=(*self._view.evals, metrics))

    def warn(self, text: str) -> None:
        """Shows a warning, now and in the summary."""
        self.warnings.append(text)
        self._screen.warn(text)

    def warn_of_late(self, names: Sequence[str], version: int) -> None:
        """Warns of generators that the release of a version did not wait for."""
        for name in sorted(names):
            self.warn(
                f"{name} has not adopted version {version} in time (weight_sync.patience_s = "
                f"{self._config.weight_sync.patience_s:g}); the run continues without it until it has caught up"
            )

    def warn_of_other_weights(self, version: int, before: str, now: str) -> None:
        """Warns that a version that was trained again has other weights."""
        self.warn(
            f"version {version} was trained again and has fingerprint {now} instead of {before}: rollouts sampled "
            "before come from slightly different weights; the same layout on the same processors gives equal ones"
        )

    def skipped(self, step: int, cause: str, whose: str = "") -> None:
        """Warns of a step that changed no weights."""
        self.warn(f"step {step} {whose}was skipped (trainer.on_nonfinite = 'skip'): {cause}")

    def step(
        self,
        groups: Sequence[RolloutGroup],
        result: PolicyStepResult,
        mark: StepMark,
        sync: SyncReport,
        ready_groups: int,
    ) -> None:
        """Records a completed optimizer step."""
        metrics = self._metrics(groups, result, mark, sync, ready_groups)
        self._marks.append(mark)
        if not self.progress.recorded:
            self.first_step_ended_s = mark.ended_s
        self.progress.recorded = metrics.step
        self.num_samples += sum(len(group.rollouts) for group in groups)
        self.num_invalid += sum(r.outcome is Outcome.INVALID for group in groups for r in group.results)
        self.staleness_max = max(self.staleness_max, metrics.staleness_max)
        if result.skipped:
            self.skipped(metrics.step, result.cause)
        ids = [group.group_id for group in groups]
        self.flow.done(metrics.step, ids, mark.ended_s, sync.publish_s, sync.sync_s)
        self._log.log(metrics)
        self._show(
            step=metrics.step,
            metrics=metrics,
            rewards=(*self._view.rewards, metrics.reward_mean),
            completions=self._completions(groups, result),
        )

    def trained_again(self, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> None:
        """Records a step that an earlier process completed and did not record. Its times are unknown."""
        self._marks.append(self.mark())
        unknown = replace(self.mark(), ended_s=NAN)
        self._log.log(self._metrics(groups, result, unknown, SyncReport(), 0))
        self._marks.clear()

    def _metrics(
        self, groups: Sequence[RolloutGroup], result: PolicyStepResult, mark: StepMark, sync: SyncReport, ready: int
    ) -> StepMetrics:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lengths = np.array([rollout.is_sampled_T.sum() for rollout in rollouts])
        judged = [r.value for group in groups for r in group.results if r.outcome is not Outcome.INVALID]
        right = sum(answer.is_right for group in groups for answer in group.results)
        consumed_at = result.policy_version - 1
        ages = [consumed_at - rollout.oldest_version for rollout in rollouts if rollout.num_tokens]
        staleness = np.array(ages or [0])
        previous, mask_truncated = self._marks[-1], self._config.shaping.mask_truncated
        step_s = mark.ended_s - previous.ended_s
        # Spans arrive up to a poll late, so the window ends before that.
        recent = self.accounts(self._marks[0].ended_s, mark.ended_s - 2 * self._poll_interval_s)
        first_step = result.policy_version - len(self._marks) + 1
        return StepMetrics(
            step=result.policy_version,
            policy_version=result.policy_version,
            wall_s=mark.ended_s - self.started_s,
            step_s=step_s,
            samples_per_s=len(rollouts) / step_s,
            generated_tokens_per_s=(mark.generators.generated_tokens - previous.generators.generated_tokens) / step_s,
            reward_mean=float(np.mean(judged)) if judged else NAN,
            solve_rate=right / max(len(judged), 1),
            invalid_share=1 - len(judged) / len(rollouts),
            response_tokens_mean=float(lengths.mean()),
            response_tokens_max=int(lengths.max()),
            truncated_share=float(np.mean([r.finish_reason is FinishReason.LENGTH for r in rollouts])),
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            staleness_limit=self._staleness_limit,
            update=result.update,
            waiting_rollouts=mark.generators.num_waiting,
            running_rollouts=mark.generators.num_running,
            ready_groups=ready,
            busy_share=recent.busy_share if recent.window_s > 0 else {},
            sync_s=sync.sync_s,
            verdict=str(verdict(recent, first_step, result.policy_version)) if recent.window_s > 1 else None,
            fingerprint=sync.fingerprint or None,
            extra=result.metrics
            | mark.generators.since(previous.generators)
            | sync.metrics()
            | {
                "entropy_mean": _entropy_mean(rollouts),
                "resumed_segments": mark.resumed_segments - previous.resumed_segments,
                **(_episode_metrics(groups, mark, previous) if self._config.has_episodes else {}),
                **_reward_parts(groups),
                **self.sources.step(groups, consumed_at),
                "dropped_groups": mark.dropped_groups - previous.dropped_groups,
                "flat_groups": sum(is_flat(group, mask_truncated=mask_truncated) for group in groups),
                "controller_cpu_s": mark.controller_cpu_s - previous.controller_cpu_s,
                "calls": mark.calls - previous.calls,
                "record_share": (mark.journal_s - previous.journal_s) / step_s,
            }
            | self.usages(MAX_IN_METRICS),
        )

    def accounts(self, start_s: float, end_s: float) -> Accounts:
        """Returns which executors worked when, from the spans that have arrived."""
        return account(self._recent_spans(start_s), start_s, end_s)

    def _recent_spans(self, start_s: float) -> dict[str, list[Span]]:
        recent = dict[str, list[Span]]()
        for name, spans in self.spans.items():
            taken = recent[name] = list[Span]()
            for span in reversed(spans):  # nearly sorted: a few may have arrived late
                if span.end_s < start_s - 5 * self._poll_interval_s:
                    break
                taken.append(span)
        return recent

    def _completions(self, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> tuple[CompletionView, ...]:
        shown = list(groups)[: self._config.screen.completions]
        return tuple(
            CompletionView(
                prompt=group.prompt.text,
                response=group.responses[0],
                reward=group.results[0].value if group.results[0].outcome is not Outcome.INVALID else NAN,
                advantage=float(result.advantages[group.group_id][0]),
                turns=group.rollouts[0].num_turns,
            )
            for group in shown
        )

    def _show(self, **changes: Any) -> None:
        marks = self._marks
        if len(marks) > 1:
            changes["recent_step_s"] = (marks[-1].ended_s - marks[0].ended_s) / (len(marks) - 1)
        busy_share = last.busy_share if (last := changes.get("metrics", self._view.metrics)) else {}
        if self._generators is not None and len(marks) > 1:
            tokens = marks[-1].generators.generated_tokens - marks[0].generators.generated_tokens
            changes["generated_tokens_per_s"] = tokens / (marks[-1].ended_s - marks[0].ended_s)
            stats = self._generators.stats
            changes["running_rollouts"], changes["waiting_rollouts"] = stats.num_running, stats.num_waiting
        changes["executors"] = tuple(
            ExecutorView(
                name=name,
                state=f"{status.doing} {status.doing_age_s:.1f} s",
                busy_share=busy_share.get(name, NAN),
                heartbeat_s=status_s,
            )
            for name, (status, status_s) in self._status.items()
        )
        self._view = replace(self._view, **changes)
        self._screen.show(self._view)


def _episode_metrics(groups: Sequence[RolloutGroup], mark: StepMark, previous: StepMark) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [rollout.num_turns for rollout in rollouts]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    num_observed = num_tokens - sum(int(rollout.is_sampled_T.sum()) for rollout in rollouts)
    return {
        "turns_mean": float(np.mean(turns)),
        "turns_max": float(max(turns)),
        "observed_share": num_observed / max(num_tokens, 1),
        "observed_tokens_mean": num_observed / len(rollouts),
        "replies_raised": sum(result.reason.startswith(RAISED) for group in groups for result in group.results),
        "environment_wait_s": mark.environment.wait_s - previous.environment.wait_s,
        "tool_calls": mark.environment.calls - previous.environment.calls,
        "tool_errors": mark.environment.errors - previous.environment.errors,
    }


def _entropy_mean(rollouts: Sequence[Rollout]) -> float:
    """Estimates the entropy of the sampling distribution, in nats per token. Returns NaN if there are no tokens.

    The mean of -log p over sampled tokens is an unbiased estimate.
    """
    num = sum(int(rollout.is_sampled_T.sum()) for rollout in rollouts if len(rollout.behavior_logprobs_T))
    # The log-probabilities of observed tokens are 0.
    return -sum(float(rollout.behavior_logprobs_T.sum()) for rollout in rollouts) / num if num else NAN


def _reward_parts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Returns the mean of each part of the reward as `reward.NAME`, or nothing if the reward has one part."""
    values = defaultdict[str, list[float]](list)
    for result in (result for group in groups for result in group.results):
        for name, value in result.parts.items():
            values[f"reward.{name}"].append(value)
    return {name: float(np.mean(of_part)) for name, of_part in values.items()}


class SourceTallies:
    """Metrics of each source of a mixture, for a step and for all steps together.

    Metrics are called `source_NAME.LABEL`. A run without named sources has none.

    Example::

        tallies = SourceTallies(["algebra", "code"], mask_truncated=True)
        tallies.step(groups, version=3)["source_reward.code"]
        tallies.totals()["source_share.algebra"]
    """

    def __init__(self, labels: Iterable[str], *, mask_truncated: bool) -> None:
        self._labels, self._mask_truncated = tuple(labels), mask_truncated
        self._sums, self._weights = Counter[str](), Counter[str]()
        """Sums over groups, and numbers of groups, by metric."""
        self._num_groups = dict.fromkeys(self._labels, 0)

    def step(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """Adds the groups that a step takes at `version`. Returns their metrics."""
        by_source = {label: [group for group in groups if group.prompt.source == label] for label in self._labels}
        metrics = dict[str, float]()
        for label, part in by_source.items():
            metrics[f"{SOURCES}share.{label}"] = len(part) / len(groups)
            for name, value in self._measured(part, version).items() if part else ():
                metrics[f"{SOURCES}{name}.{label}"] = value
                if np.isfinite(value):
                    self._sums[f"{SOURCES}{name}.{label}"] += value * len(part)  # type: ignore[assignment]
                    self._weights[f"{SOURCES}{name}.{label}"] += len(part)
            self._num_groups[label] += len(part)
        return metrics

    def totals(self) -> dict[str, float]:
        """Returns metrics of all steps so far: means over the groups of each source."""
        total = sum(self._num_groups.values())
        shares = {f"{SOURCES}share.{label}": num / total for label, num in self._num_groups.items() if total}
        return shares | {name: value / self._weights[name] for name, value in self._sums.items()}

    def _measured(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        results = [result for group in groups for result in group.results]
        judged = [result.value for result in results if result.outcome is not Outcome.INVALID]
        ages = [version - rollout.oldest_version for rollout in rollouts if rollout.num_tokens]
        return {
            "reward": float(np.mean(judged)) if judged else NAN,
            "right": sum(result.is_right for result in results) / len(judged) if judged else NAN,
            "invalid": 1 - len(judged) / len(results),
            "flat": float(np.mean([is_flat(group, mask_truncated=self._mask_truncated) for group in groups])),
            "tokens": float(np.mean([rollout.is_sampled_T.sum() for rollout in rollouts])),
            "truncated": float(np.mean([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])),
            "staleness": float(np.mean(ages or [0])),
        }
