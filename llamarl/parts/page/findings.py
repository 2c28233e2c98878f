"""Findings about a run, which a page shows first. Each finding names the chart that shows it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple

from llamarl.observability.metrics import SOURCES, accuracy_error, counted, held_out, number, percent, plain, unjudged
from llamarl.parts.page.headline import fall_errors
from llamarl.parts.page.run_data import RunData
from llamarl.parts.page.trend import PART, Ends, ends

ERRORS = 2.0
"""Minimum size of a reported change, in standard errors."""
BEST_ERRORS, LOST_SHARE = 4.0, 0.5
"""Thresholds of a lost gain. The best of many values is high by chance, so it must exceed the end by this number of
standard errors, and this share of the gain must be gone."""
SHRUNK_SHARE = 0.5
"""Response length, as a share of the initial one, below which a finding is shown. Short responses may be intended."""
FLAT_SHARE = 0.95
"""Share of a source's groups with equal rewards above which the source gives no training signal."""
MISMATCH_KL, TRUNCATED_SHARE, INVALID_SHARE, IDLE_SHARE = 0.05, 0.2, 0.05, 0.5
COLLAPSED_SHARE, COLLAPSED_NATS = 0.2, 0.05
"""Entropy, as a share of the initial value and in nats per token, below which little exploration is left."""
GRADIENT_GROWTH = 20.0
FAR_LOAD, LEAST_AGREEMENT = 3.0, 0.9
"""Thresholds for experts: load of one expert over the mean (3 means three quarters of the tokens if each uses two of
eight experts), and share of recorded expert choices that routers reproduce."""
NUM_AGREEMENTS = 3
"""Probes to average, as each covers few sequences."""
_LEARNT_FROM = re.compile(r"data\.eval(?: \((\S+)\))?: all of its prompts are in data\.train")
"""Warning of a run about a held-out set that overlaps with the training data, with the name of the set."""
Level = Literal["good", "note", "advice", "bad"]
"""`bad` is a failure. `advice` suggests what to try."""
HACKED = "Read rollouts with a high reward, and tighten what the reward accepts."
FELL = (
    "Try a lower trainer.learning_rate, a KL penalty (reference.kl_coefficient) or larger groups (rollout.group_size)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One finding."""

    text: str
    """Clause without a final period."""
    chart: str
    """Identifier of the chart."""
    level: Level = "note"
    advice: str = ""
    """Sentences that suggest what to try. Empty means no suggestion."""


class Window(NamedTuple):
    """Consecutive steps."""

    value: float
    """Mean over the steps."""
    place: int
    """Position of the last step."""
    size: int


def highest(values: Sequence[float]) -> Window | None:
    """Returns the window with the highest mean, of a twentieth of the steps and at least two. None means too few
    steps."""
    known = [(value, place) for place, value in enumerate(values) if math.isfinite(value)]
    size = max(2, len(known) // 20)
    sums = [0.0, *accumulate(value for value, _ in known)]
    found = (((sums[end] - sums[end - size]) / size, known[end - 1][1], size) for end in range(size, len(sums)))
    return max((Window(*one) for one in found), default=None)


def findings(data: RunData) -> list[dict[str, str]]:
    """Returns the findings about a run: first learning, then the limit of its speed, then suspicious values."""
    state, reason = data.state()
    claims = list[Claim]()
    if state in ("failed", "interrupted", "silent", "empty"):
        what = {"failed": "the run failed", "interrupted": "the run was interrupted"}.get(state, "")
        level: Level = "note" if state == "interrupted" else "bad"
        claims.append(Claim(text=": ".join(filter(None, [what, reason])), chart="messages", level=level))
    if data.num_damaged:
        text = f"{data.num_damaged} rows of the run's files are damaged and left out"
        claims.append(Claim(text=text, chart="messages", level="advice"))
    if data.content("forecast.json"):  # a simulation does not learn
        claims += _speed(data)
    elif data.num_steps and data.work == "sft":
        claims += (*_fitted(data), *_grown(data), *_warned(data))
    elif data.num_steps:
        claims += (*_learnt(data), *_speed(data), *_wrong(data))
    elif state != "empty":
        claims.append(Claim(text="no step has been completed", chart="messages"))
    return [asdict(claim) for claim in claims]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Change of a quantity from the beginning to the end of a run."""

    verb: Literal["rose", "fell", "did not change beyond its error,"]
    ends: Ends
    best: float
    """Best value, including both ends."""
    best_step: int
    is_lower: bool
    """Whether the end is clearly worse than the best value."""
    is_lost: bool
    """Whether most of the gain is lost at the end."""

    @property
    def level(self) -> Level:
        return "advice" if self.is_lost or self.verb == "fell" else "good" if self.verb == "rose" else "note"

    @property
    def advice(self) -> str:
        if not (self.is_lost or self.is_lower or self.verb == "fell"):
            return ""
        best = f" The best was at step {self.best_step}: `llamarl export RUN --step N` exports a checkpoint near it."
        return FELL + (best if self.is_lower else "")

    def text(self, show: Callable[[float], str], change: str) -> str:
        """Args: `show`: formats a value; `change`: formats the change from the first to the last value."""
        best, last = f"{show(self.best)} (step {self.best_step})", show(self.ends.last)
        if self.is_lost:
            return f"fell from its best of {best} to {last}"
        text = f"{self.verb} from {show(self.ends.first)} to {last} ({change})"
        return f"{text}, below its best of {best}" if self.is_lower else text


def _change(
    found: Ends, best: float, best_step: int, lost: float, lost_error: float, errors: float = BEST_ERRORS
) -> Change:
    """Compares the end with the beginning and with the best value.

    Args:
        lost: difference between the best value and the end, with its error.
        errors: minimum difference in standard errors.
    """
    is_same, is_lower = (
        abs(found.change) <= ERRORS * found.error,
        best > found.first and lost > errors * lost_error,
    )
    return Change(
        verb="did not change beyond its error," if is_same else "rose" if found.change > 0 else "fell",
        ends=found,
        best=best,
        best_step=best_step,
        is_lower=is_lower,
        is_lost=is_lower and lost > LOST_SHARE * (best - min(found.first, found.last)),
    )


def _accuracy(evals: Sequence[dict[str, Any]]) -> Change | None:
    if len(evals) < 2:
        return None
    first, last, best = evals[0], evals[-1], max(evals, key=lambda one: float(one["accuracy"]))
    errors = [math.hypot(accuracy_error(one), accuracy_error(last)) for one in (first, best)]
    found = Ends(first=first["accuracy"], last=last["accuracy"], error=errors[0])
    lost = best["accuracy"] - found.last
    return _change(found, best["accuracy"], int(best["step"]), lost, errors[1], fall_errors(len(evals)))


def _reward(data: RunData) -> Change | None:
    rewards = data.columns.get("reward_mean", ())
    found, best = ends(rewards), highest(rewards)
    if found is None or best is None:
        return None
    known = [value for value in rewards if math.isfinite(value)]
    jumps = [(after - before) ** 2 for before, after in pairwise(known)]
    noise = math.sqrt(sum(jumps) / len(jumps) / 2)  # of one step, independent of the trend (von Neumann 1941)
    # The last steps are the best of a reward that still rises.
    lost = best.value - max(found.last, sum(known[-best.size :]) / best.size)
    return _change(found, best.value, int(data.columns["step"][best.place]), lost, noise * math.sqrt(2 / best.size))


def _learnt(data: RunData) -> Iterator[Claim]:
    changes = {name: change for name, rows in data.eval_sets.items() if (change := _accuracy(rows))}
    reward = _reward(data)
    doubt = _doubt(data, changes) if reward and reward.level == "good" and not reward.is_lower else None
    claims = list(_unheld(data))
    for name, accuracy in changes.items():
        change = f"{100 * accuracy.ends.change:+.1f} ± {100 * accuracy.ends.error:.1f} points"
        text = f"{held_out(name)} accuracy {accuracy.text(lambda share: percent(share, 1), change)}"
        claims.append(Claim(text=text, chart="solve", level=accuracy.level, advice=accuracy.advice))
    if reward is None:
        text = f"{data.num_steps} steps are too few to show whether the run learns"
        yield from (*claims, Claim(text=text, chart="reward"))
        return
    change = f"{reward.ends.change:+.3g} ± {reward.ends.error:.2g}"
    text = f"reward {reward.text(lambda value: f'{value:.3g}', change)}"
    if doubt:
        advice = "Use more prompts, or fewer passes over them." if "memorize" in doubt else HACKED
        yield Claim(text=f"{text} while {doubt}", chart="reward", level="advice", advice=advice)
        yield from claims
    else:
        is_told = bool(changes) and reward.level == "good"
        level = "note" if is_told else reward.level
        is_advised = any(change.advice for change in changes.values())
        advice = "" if is_advised else reward.advice
        yield from (*claims, Claim(text=text, chart="reward", level=level, advice=advice))
    length = ends(data.columns.get("response_tokens_mean", ()))
    if length and length.last < SHRUNK_SHARE * length.first:
        shrank = f"responses shrank from {number(length.first)} to {number(length.last)} tokens"
        yield Claim(text=shrank, chart="length")


def _learnt_from(data: RunData) -> list[str]:
    """Returns the names of held-out sets whose problems are in the training data, from the run's warnings. An empty
    name means the only set."""
    warnings = (text for kind, _, text in data.texts if kind == "warning")
    return list(dict.fromkeys(found[1] or "" for text in warnings if (found := _LEARNT_FROM.match(text))))


def _unheld(data: RunData) -> Iterator[Claim]:
    """Yields findings about faults of the evaluations."""
    for name in _learnt_from(data):
        of_set = f" ({plain(name)})" if name else ""
        text = f"data.eval{of_set} is data.train: held-out accuracy is measured on prompts that the run trained on"
        yield Claim(text=text, chart="settings", level="advice", advice="Set aside some prompts for data.eval.")
    for name, (num, all_of_them, reason) in data.unjudged.items():
        if num > INVALID_SHARE * all_of_them:
            yield Claim(text=f"{held_out(name)}: {unjudged(num, all_of_them, reason)}", chart="solve", level="advice")


def _doubt(data: RunData, accuracies: Mapping[str, Change]) -> str | None:
    """Returns a warning about a rising reward: right answers (judged by its first part) became fewer on held-out
    problems, or, without any, in training; or they rose only in training. One rising held-out set is enough to withhold
    it. None means no warning."""
    solved = ends(data.columns.get("solve_rate", ()))
    if not accuracies:
        fell = solved and solved.change < -ERRORS * solved.error
        return "fewer answers are right: the reward may be hacked" if fell else None
    levels = {one.level for one in accuracies.values()}
    if "advice" in levels and "good" not in levels:
        return "held-out accuracy fell: the reward may be hacked"
    unlearnt = [one.ends for name, one in accuracies.items() if name not in _learnt_from(data)]
    if unlearnt and levels == {"note"} and solved and solved.change > ERRORS * solved.error:
        best = max(unlearnt, key=lambda one: one.last)
        gap, error = solved.last - best.last, math.hypot(solved.error, best.error)
        return "held-out accuracy does not follow: the run may memorize its prompts" if gap > ERRORS * error else None
    return None


def _is_cut(truncated: Ends) -> bool:
    return truncated.last > TRUNCATED_SHARE and truncated.change > ERRORS * truncated.error


def _speed(data: RunData) -> Iterator[Claim]:
    """Yields findings about speed: the run's verdict over all steps if it has ended, otherwise over the last steps."""
    last = data.summary or {name: column[-1] for name, column in data.columns.items()} | {"verdict": data.verdict}
    if last.get("verdict"):
        yield Claim(text=str(last["verdict"]).rstrip("."), chart="timeline" if data.num_steps else "forecast")
    shares = {name[11:]: share for name, share in last.items() if name.startswith("busy_share.generator")}
    if idle := [name for name, share in shares.items() if isinstance(share, float) and share < IDLE_SHARE]:
        text = f"{', '.join(idle[:4])} idle more than half of the time"
        advice = "Use fewer generators (generator.replicas), or let them work ahead (rollout.max_staleness)."
        yield Claim(text=text, chart="timeline", level="advice", advice=advice)


def _wrong(data: RunData) -> Iterator[Claim]:
    def last(name: str) -> Ends | None:
        return ends(data.columns.get(name, ()))

    ages, limits = (data.columns.get(name, ()) for name in ("staleness_max", "staleness_limit"))
    if over := sum(now > limit for now, limit in zip(ages, limits, strict=False)):
        text = f"staleness exceeded its limit in {over} steps, which is a bug: please report it"
        yield Claim(text=text, chart="staleness", level="bad")
    drift, differ = (
        "Lower rollout.max_staleness or trainer.learning_rate.",
        "See docs/generation.md; compare trainer.dtype with generator.dtype.",
    )
    for name, what, advice in (
        ("kl_to_behavior", "drift apart", drift),
        ("extra.kl_same_version", "compute different numbers", differ),
    ):
        kl = highest(data.columns.get(name, ()))
        if kl and kl.value > MISMATCH_KL:
            step = int(data.columns["step"][kl.place])
            text = f"trainer and generators {what}: KL up to {number(kl.value)} nats per token (step {step})"
            yield Claim(text=text, chart="kl", level="advice", advice=advice)
    entropy = last("extra.entropy_mean")
    if entropy and entropy.last < COLLAPSED_SHARE * entropy.first and entropy.last < COLLAPSED_NATS:
        text = f"entropy collapsed: {number(entropy.first)} → {number(entropy.last)} nats per token"
        advice = "Lower trainer.learning_rate, or use a loss that clips higher (dapo)."
        yield Claim(text=text, chart="entropy", level="advice", advice=advice)
    truncated = last("truncated_share")
    if truncated and _is_cut(truncated):
        text = f"more responses are truncated: {percent(truncated.first)} → {percent(truncated.last)}"
        advice = "Raise rollout.max_new_tokens, or set shaping.overlong_penalty."
        yield Claim(text=text, chart="truncated", level="advice", advice=advice)
    invalid = last("invalid_share")
    if invalid and max(invalid.first, invalid.last) > INVALID_SHARE:
        text = f"the reward could not judge {percent(max(invalid.first, invalid.last))} of the responses"
        advice = "Filter the rollouts by `not judged` and read the reasons."
        yield Claim(text=text, chart="truncated", level="advice", advice=advice)
    yield from (*_sources(data), *_experts(data), *_grown(data), *_warned(data))


def _grown(data: RunData) -> Iterator[Claim]:
    gradient = ends(data.columns.get("grad_norm", ()))
    if gradient and gradient.last > GRADIENT_GROWTH * gradient.first > 0:
        text = f"gradient norm grew from {number(gradient.first)} to {number(gradient.last)}"
        yield Claim(text=text, chart="grad", level="advice", advice="Lower trainer.learning_rate.")


def _warned(data: RunData) -> Iterator[Claim]:
    if num := sum(kind == "warning" for kind, _, _ in data.texts):
        yield Claim(text=counted(num, "warning"), chart="messages")


def _fitted(data: RunData) -> Iterator[Claim]:
    """Yields the finding about the loss of a supervised run, over its first and last steps."""
    loss = ends(data.columns.get("loss", ()))
    if loss is None:
        yield Claim(text=f"{data.num_steps} steps are too few to compare losses", chart="loss")
        return
    is_same = abs(loss.change) <= ERRORS * loss.error
    verb = "rose" if loss.change > 0 else "fell"
    text = f"loss {verb} from {number(loss.first)} to {number(loss.last)}"
    level: Level = "note" if is_same else "good" if verb == "fell" else "advice"
    yield Claim(text="loss did not change beyond its error" if is_same else text, chart="loss", level=level)


def _sources(data: RunData) -> Iterator[Claim]:
    """Yields findings about sources of a mixture without a training signal or without verdicts."""
    for name, column in data.columns.items():
        key, _, label = name.removeprefix("extra.").partition(".")
        found = ends(column) if key in (f"{SOURCES}flat", f"{SOURCES}invalid") else None
        if found and key == f"{SOURCES}flat" and found.last > FLAT_SHARE:
            text = f"source {label} teaches nothing: {percent(found.last)} of its groups have equal rewards"
            yield Claim(text=text, chart="source-flat", level="advice")
        elif found and key == f"{SOURCES}invalid" and max(found.first, found.last) > INVALID_SHARE:
            text = f"{percent(max(found.first, found.last))} of the responses of source {label} could not be judged"
            yield Claim(text=text, chart="source-faults", level="advice")


def _experts(data: RunData) -> Iterator[Claim]:
    """Yields findings about a mixture of experts: the layer with most idle experts, the layer with the highest load of
    one expert, and routers that differ from the recorded choices."""
    freeze = "trainer.train_router = false"
    mend = f"{freeze} from an earlier checkpoint on, or another base model if it began so"
    if (idle := _worst(data, "extra.idle_experts.", min)) and idle[0] >= 1:
        what = "expert has no rows, and learns nothing" if idle[0] < 2 else "experts have no rows, and learn nothing"
        yield Claim(text=f"{idle[0]:.0f} {what}, in layer {idle[1]}: {mend}", chart="idle", level="advice")
    if (load := _worst(data, "extra.expert_load.", fmean)) and load[0] > FAR_LOAD:
        text = f"an expert of layer {load[1]} has {number(load[0])} times the mean's rows: {mend}"
        yield Claim(text=text, chart="load")
    agreed = [share for share in data.columns.get("extra.routes_agreement", ()) if math.isfinite(share)]
    if agreed and (share := fmean(agreed[-NUM_AGREEMENTS:])) < LEAST_AGREEMENT:
        text = f"the trainer's routers would make {percent(share)} of the recorded choices: a lower "
        text += f"rollout.max_staleness or trainer.learning_rate, or {freeze}"
        yield Claim(text=text, chart="agreement", level="advice")


def _worst(data: RunData, prefix: str, of_last: Callable[[list[float]], float]) -> tuple[float, str] | None:
    """Returns the layer with the highest metric over the last steps, and the value. None means too few steps."""
    found = list[tuple[float, str]]()
    for name, column in data.columns.items():
        known = [value for value in column if math.isfinite(value)] if name.startswith(prefix) else []
        if len(known) >= 4:
            found.append((of_last(known[-max(2, int(PART * len(known))) :]), name.removeprefix(prefix)))
    return max(found, key=itemgetter(0), default=None)
