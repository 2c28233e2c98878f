"""`what_if`: trains with other settings on the recorded rollouts of a run, and writes the result as a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from llamarl.config import ConfigError, RunConfig
from llamarl.config.load import flat_settings
from llamarl.controller.flight import Flight, Replicas
from llamarl.controller.progress import Progress
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.observability.metrics import UpdateMetrics, counted
from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import EventLog, MetricsLog, RecordedScreen, start_of_run
from llamarl.parts.replay.replay import ReplayRequest, replay
from llamarl.run.folder import RunFolder, prepare_run_folder
from llamarl.run.journal import open_journal
from llamarl.run.placement import models_in_use
from llamarl.training.result import PolicyStepResult
from llamarl.types import RolloutGroup

FAR_NATS = 0.1
"""KL per token between sampling and trained policy above which the result says little."""
_MAY_CHANGE = ("trainer", "shaping", "name", "output", "steps")


def changed(run: RunConfig, other: RunConfig) -> dict[str, tuple[object, object]]:
    """Returns the settings that differ from the run. Raises ConfigError if they would change the rollouts."""
    before, after = (dict(flat_settings(one.model_dump(mode="json", exclude_none=True))) for one in (run, other))
    found = {
        name: (before.get(name), after.get(name))
        for name in before | after
        if before.get(name) != after.get(name) and name not in ("name", "output", "steps")
    }
    for name in found:
        if name.split(".")[0] not in _MAY_CHANGE:
            raise ConfigError(
                f"--{name}: rollouts are as they were recorded, and {name} would make others; change trainer.* and "
                "shaping.* alone, or start a run"
            )
    if new := models_in_use(other).keys() - models_in_use(run).keys():
        raise ConfigError(
            f"trainer.advantage = {other.trainer.advantage.name!r} needs a {min(new)}, of which the run has nothing on "
            "record; use an advantage without one"
        )
    return found


def what_if(
    request: ReplayRequest, config: RunConfig, written: RunConfig, *, overwrite: bool, tell: Callable[[str], None]
) -> Path:
    """Trains on the recorded steps with the settings of `config`. Returns the folder of the result, which contains the
    settings in the form `written`. Raises ConfigError, ExecutorError."""
    other = changed(request.journal, config)
    said = ", ".join(f"{name} = {now!r} (was {was!r})" for name, (was, now) in other.items()) or "nothing that differs"
    if Path(config.output, config.name).resolve() == request.folder.path.resolve():
        raise ConfigError(f"--name {config.name} is the run that is replayed; choose another name")
    if not overwrite and RunFolder(Path(config.output, config.name)).has_begun():
        raise ConfigError(f"{config.output}/{config.name} exists; replace it (--overwrite) or choose another --name")
    with prepare_run_folder(written, resume=False, overwrite=overwrite, pinned=config) as folder:
        updates = _recorded(request, folder, f"off-policy replay of {request.folder.path} with {said}")
        ratio = max((one.importance_ratio_max or 1.0 for one in updates), default=1.0)
        kl = max((abs(one.kl_to_behavior or 0.0) for one in updates), default=0.0)
        trust = "far from" if kl > FAR_NATS else "near"
        steps = counted(request.tally.steps, "recorded step")
        tell(
            f"trained on {steps} with {said}: importance ratios up to {ratio:.3g}, KL to the sampling policy up "
            f"to {kl:.2g} nats a token: {trust} what a separate run would learn from"
        )
    return folder.path


def _recorded(request: ReplayRequest, folder: RunFolder, mark: str) -> Sequence[UpdateMetrics]:
    """Trains the steps and records their metrics as a run does."""
    config, rollout, updates = request.config, request.config.rollout, list[UpdateMetrics]()
    events = EventLog(folder.events, print)
    events.add("start", **start_of_run(), replay_of=str(request.folder.path))
    log, keeps_all = MetricsLog(folder.metrics, print), config.record.model_copy(update={"kind": "all"})
    journal = open_journal(config.model_copy(update={"record": keeps_all}), request.problems, folder, print)
    journal.begin(request.first - 1)
    numbers = {one.prompt_id: number for number, one in enumerate(request.problems.train)}
    limit = rollout.staleness_limit
    telemetry = Telemetry(config, RecordedScreen(NullScreen(), events), log, limit, events=events)
    events.add("warning", text=mark)

    def trained(step: int, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> None:
        if not updates:
            telemetry.attach([], Replicas([], Flight(config, journal), Supervisor(), Progress(), 0.0), Progress())
        updates.append(result.update)
        telemetry.trained_again(groups, result)
        prompts = {one.group_id: numbers[one.prompt.prompt_id] for one in groups}
        journal.groups(groups, prompts.__getitem__)
        journal.step([*prompts], {"step": step, "sampler": {}, "next_group_id": 0, "unconsumed": []}, result)

    try:
        replay(request._replace(trained=trained))
        events.add("end", end="finished", reason=mark)
    finally:
        for one in (log, journal, events):
            one.close()
    return updates
