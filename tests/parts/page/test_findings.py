"""What a page says first, of runs that are made up and of real ones whose curves were kept."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.config import RunConfig
from llamarl.config.data import EvalConfig
from llamarl.controller.evaluation import HeldOutSet
from llamarl.parts.page.cli import report
from llamarl.parts.page.findings import ends, findings
from llamarl.run.prepare import overlap_warnings
from tests.controller.fakes import prompts
from tests.parts.page.runs import (
    BEGAN_S,
    eval_row,
    make_run,
    read,
    step_row,
    write_rows,
)

PAGE = Path(report.__file__).parents[1]

ASTRAY = (
    "the trainer's routers would make 80% of the recorded choices: a lower rollout.max_staleness or "
    "trainer.learning_rate, or trainer.train_router = false"
)


def claims(folder: Path) -> dict[str, str]:
    return {claim["text"]: claim["chart"] for claim in findings(read(folder))}


class TestClaims:
    def test_what_was_learnt_with_its_error(self, tmp_path: Path) -> None:
        found = claims(make_run(tmp_path / "made"))
        text = "held-out accuracy rose from 20.0% to 60.0% (+40.0 ± 6.3 points)"
        assert found[text] == "solve", found
        assert any(text.startswith("reward ") and chart == "reward" for text, chart in found.items())
        assert any(chart == "timeline" for chart in found.values()), "what bounds the speed"

    def test_noise_is_no_change(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end=None)
        write_rows(folder / "metrics.jsonl", [eval_row(20, 0.22)])
        assert any("did not change beyond its error" in text for text in claims(folder))

    @pytest.mark.parametrize(
        ("metric", "first", "last", "chart"),
        [
            ("kl_to_behavior", 0.001, 0.2, "kl"),
            ("extra.kl_same_version", 0.001, 0.2, "kl"),
            ("extra.kl_mismatch", 0.001, 0.2, "kl"),  # its name in older runs
            ("extra.entropy_mean", 0.8, 0.01, "entropy"),
            ("truncated_share", 0.01, 0.5, "truncated"),
            ("invalid_share", 0.0, 0.1, "truncated"),
            ("grad_norm", 0.1, 9.0, "grad"),
            ("staleness_max", 1, 3, "staleness"),
        ],
    )
    def test_what_looks_wrong(self, tmp_path: Path, metric: str, first: float, last: float, chart: str) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        write_rows(folder / "metrics.jsonl", [step_row(step, **{metric: first}) for step in range(1, 21)])
        assert chart not in {claim["chart"] for claim in findings(read(folder)) if claim["level"] in ("advice", "bad")}
        rows = [step_row(step, **{metric: last + 1e-3 * (step % 2)}) for step in range(21, 41)]
        write_rows(folder / "metrics.jsonl", rows)
        assert chart in {claim["chart"] for claim in findings(read(folder)) if claim["level"] in ("advice", "bad")}

    @pytest.mark.parametrize(
        ("metric", "fine", "bad", "text", "chart"),
        [
            ("flat", 0.9, 0.99, "source svamp teaches nothing: 99% of its groups have equal rewards", "source-flat"),
            ("invalid", 0.01, 0.3, "30% of the responses of source svamp could not be judged", "source-faults"),
        ],
    )
    def test_a_source_that_teaches_nothing_is_named(
        self, tmp_path: Path, metric: str, fine: float, bad: float, text: str, chart: str
    ) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        names = {f"extra.source_{metric}.gsm8k": fine, f"extra.source_{metric}.svamp": fine}
        write_rows(folder / "metrics.jsonl", [step_row(step, **names) for step in range(1, 21)])
        assert not any("source" in one for one in claims(folder))
        names |= {f"extra.source_{metric}.svamp": bad}
        write_rows(folder / "metrics.jsonl", [step_row(step, **names) for step in range(21, 41)])
        assert claims(folder)[text] == chart
        assert not any("gsm8k" in one for one in claims(folder))

    @pytest.mark.parametrize(
        ("metric", "fine", "bad", "text", "chart"),
        [
            ("idle_experts.2", [0], [2, 3], "2 experts have no rows, and learn nothing, in layer 2: FREEZE", "idle"),
            ("idle_experts.2", [0, 3], [1], "1 expert has no rows, and learns nothing, in layer 2: FREEZE", "idle"),
            ("expert_load.2", [2.9], [3.4, 3.6], "an expert of layer 2 has 3.50 times the mean's rows: FREEZE", "load"),
            ("routes_agreement", [0.91, None], [0.8, None], ASTRAY, "agreement"),
        ],
    )  # fmt: skip
    def test_a_mixture_whose_routers_went_astray(
        self, tmp_path: Path, metric: str, fine: list[float | None], bad: list[float | None], text: str, chart: str
    ) -> None:
        """In one sentence with what to do; a step or a layer alone does not count, and a dense model has none of it."""
        folder = make_run(tmp_path / "made", steps=0, end=None)
        names = {"extra.idle_experts.1": 0, "extra.expert_load.1": 1.5, "extra.idle_experts.2": 0}
        rows = [step_row(step, **names | {f"extra.{metric}": fine[step % len(fine)]}) for step in range(1, 21)]
        write_rows(folder / "metrics.jsonl", rows)
        assert not {*claims(folder).values()} & {"idle", "load", "agreement"}
        rows = [step_row(step, **names | {f"extra.{metric}": bad[step % len(bad)]}) for step in range(21, 41)]
        write_rows(folder / "metrics.jsonl", rows)
        freeze = "trainer.train_router = false from an earlier checkpoint on, or another base model if it began so"
        assert claims(folder)[text.replace("FREEZE", freeze)] == chart

    def test_the_bound_itself_may_be_reached(self, tmp_path: Path) -> None:
        assert not any(
            "bound" in text and "stale" in text for text in claims(make_run(tmp_path / "a", staleness_max=2))
        )

    def test_who_is_idle(self, tmp_path: Path) -> None:
        """Each generator that works less than half of the time, and no other executor."""
        folder = make_run(tmp_path / "made")
        assert not any("idle" in text for text in claims(folder))
        idle = {"busy_share.generator-1": 0.4, "busy_share.generator-10": None, "busy_share.reward": 0.1}
        write_rows(folder / "metrics.jsonl", [step_row(21, **idle)])
        assert claims(folder)["generator-1 idle more than half of the time"] == "timeline"

    def test_an_evaluation_that_nobody_could_judge(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end=None)
        bad = eval_row(20, 0.0, 200) | {"accuracy": None, "num_invalid": 200, "invalid_reason": "grader\nmissing"}
        write_rows(folder / "metrics.jsonl", [bad])
        assert claims(folder)["held-out: 200 of 200 invalid: grader ↵ missing"] == "solve"
        assert not any("held-out accuracy" in text for text in claims(folder)), "one evaluation is no change"

    def test_an_evaluation_on_what_was_learnt_from(self, tmp_path: Path) -> None:
        """Then nothing can be said of what is learnt by heart. The warning is the run's own."""
        folder = make_run(tmp_path / "made", steps=0, end=None)
        rows = [step_row(step, reward_mean=0.02 * step, solve_rate=0.02 * step) for step in range(1, 41)]
        write_rows(folder / "metrics.jsonl", [eval_row(0, 0.2), *rows, eval_row(40, 0.22)])
        assert any("memorize" in text for text in claims(folder))
        (said,) = overlap_warnings([HeldOutSet(settings=EvalConfig(), prompts=prompts(2))], prompts(3))
        write_rows(folder / "events.jsonl", [{"kind": "warning", "at_s": BEGAN_S, "text": said}])
        found = claims(folder)
        assert any(text.startswith("data.eval is data.train") for text in found)
        assert not any("memorize" in text for text in found)

    def test_each_set_is_told_by_its_name(self, tmp_path: Path) -> None:
        """A reward is no hacked one as long as some set rises."""
        folder = make_run(tmp_path / "made", steps=0, end=None)
        rows = [step_row(step, reward_mean=0.02 * step) for step in range(1, 41)]
        found = {"sums": (0.2, 0.6), "words": (0.6, 0.2), "codes": (0.5, 0.51)}
        for place, step in ((0, 0), (1, 40)):
            both = [eval_row(step, ends[place]) | {"name": name} for name, ends in found.items()]
            write_rows(folder / "metrics.jsonl", both + (rows if step == 0 else []))
        told = {claim["text"].split(" from ")[0]: claim["level"] for claim in findings(read(folder))}
        assert told["held-out sums accuracy rose"] == "good"
        assert told["held-out words accuracy fell"] == "advice"
        assert told["held-out codes accuracy did not change beyond its error,"] == "note"
        assert told["reward rose"] == "note"
        last = eval_row(41, 0.2) | {"name": "sums", "num_invalid": 50, "invalid_reason": "why"}
        write_rows(folder / "metrics.jsonl", [last, eval_row(41, 0.5) | {"name": "codes"}])
        texts = [claim["text"] for claim in findings(read(folder))]
        assert any("hacked" in text for text in texts), "none rises any more"
        assert "held-out sums: 50 of 100 invalid: why" in texts, "a later set has not hidden it"

    def test_sets_that_are_learnt_from(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end=None)
        sets = [
            HeldOutSet(name=name, settings=EvalConfig(), prompts=[replace(one, source=f"eval/{name}")])
            for name, one in zip(("a", "b.c"), prompts(2), strict=True)
        ]
        said = [{"kind": "warning", "at_s": BEGAN_S, "text": text} for text in overlap_warnings(sets, prompts(1))]
        write_rows(folder / "events.jsonl", said)
        told = [text for text in claims(folder) if "is data.train" in text]
        assert [text.split(":")[0] for text in told] == ["data.eval (a) is data.train", "data.eval (b.c) is data.train"]

    def test_an_evaluation_that_is_damaged_is_left_out(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        write_rows(folder / "metrics.jsonl", [eval_row(21, 0.1) | {"accuracy": None}, {"kind": "eval", "step": 22}])
        assert len(read(folder).evals) == 2
        assert any("60.0%" in text for text in claims(folder))

    def test_what_bounds_the_speed_is_what_the_run_said(self, tmp_path: Path) -> None:
        """Of its newest step while it goes on, of all its steps once it has ended; never a third number."""
        folder = make_run(tmp_path / "made")
        write_rows(folder / "metrics.jsonl", [step_row(21, verdict="trainer-bound over steps 12 to 21, 9s: why")])
        assert claims(folder)["trainer-bound over steps 12 to 21, 9s: why"] == "timeline"
        whole = {"verdict": "balanced over steps 1 to 21, 40s: equal", "busy_share.generator-0": 0.3}
        (folder / "summary.json").write_text(json.dumps({"end": "finished", **whole}))
        found = claims(folder)
        assert found["balanced over steps 1 to 21, 40s: equal"] == "timeline"
        assert "generator-0 idle more than half of the time" in found
        assert not any(text.startswith("trainer-bound") for text in found)

    def test_every_claim_has_its_picture(self, tmp_path: Path) -> None:
        script, body = (PAGE / "curves.js").read_text(), (PAGE / "page.html").read_text()
        known = set(re.findall(r'^  \["([\w-]+)", ', script, re.MULTILINE)) | set(
            re.findall(r'<section id="(\w+)"', body)
        )
        named = set(re.findall(r'chart="(\w+)"', (PAGE / "findings.py").read_text()))
        assert named <= known, named - known

    def test_too_few_values_say_nothing(self) -> None:
        assert ends([1.0, 2.0, float("nan")]) is None


def recorded(folder: Path, name: str, steps: int | None = None) -> list[dict[str, str]]:
    """The claims about a real run of the demo, whose curves were kept, or about its first steps."""
    curves = json.loads(Path(__file__).with_name("curves.json").read_text())[name]
    evals = curves.pop("evals")
    folder = make_run(folder / name, steps=0, end=None)
    rows = [
        step_row(step, **dict(zip(curves, values, strict=True)))
        for step, values in enumerate(zip(*curves.values(), strict=True), start=1)
    ]
    write_rows(folder / "metrics.jsonl", [eval_row(*one) for one in evals if one[0] <= (steps or len(rows))])
    write_rows(folder / "metrics.jsonl", rows[:steps])
    return findings(read(folder))


class TestRecordedRuns:
    """`curves.json`: made by `benchmarks/pictures.py`."""

    def test_one_that_learns(self, tmp_path: Path) -> None:
        accuracy, reward, *_ = found = recorded(tmp_path, "good")
        assert accuracy["text"] == "held-out accuracy rose from 19.1% to 85.9% (+66.8 ± 3.3 points)"
        assert reward["text"] == "reward rose from 0.416 to 0.835 (+0.419 ± 0.049)"
        assert "advice" not in {claim["level"] for claim in found}

    def test_a_hacked_reward_is_no_success(self, tmp_path: Path) -> None:
        first, *others = recorded(tmp_path, "hacked")
        assert first["text"].startswith("reward rose from 0.6")
        assert first["text"].endswith(" while held-out accuracy fell: the reward may be hacked")
        assert first["level"] == "advice"
        assert "good" not in {claim["level"] for claim in others}

    def test_brevity_that_was_asked_for_is_no_fraud(self, tmp_path: Path) -> None:
        """Nothing but brevity is judged, held-out responses too: what happened is said, and nobody is accused."""
        found = {claim["text"]: claim["level"] for claim in recorded(tmp_path, "brief")}
        assert not any("hacked" in text for text in found)
        assert found["responses shrank from 40.0 to 15.0 tokens"] == "note"

    def test_one_that_learnt_before_it_was_hacked(self, tmp_path: Path) -> None:
        texts = [claim["text"] for claim in recorded(tmp_path, "hacked")]
        assert "held-out accuracy fell from its best of 79.7% (step 20) to 32.8%" in texts
        assert recorded(tmp_path / "early", "hacked", 30)[0]["level"] == "good", "until then nothing is wrong"

    def test_a_collapse_within_the_first_steps(self, tmp_path: Path) -> None:
        """The first fifth of the steps, which the end is compared with, is mostly after it."""
        texts = {claim["text"]: claim["level"] for claim in recorded(tmp_path, "too_fast")}
        assert texts["reward fell from its best of 0.367 (step 2) to 0"] == "advice"
        assert texts["held-out accuracy fell from 19.1% to 0.0% (-19.1 ± 2.5 points)"] == "advice"
        assert texts["trainer and generators drift apart: KL up to 0.483 nats per token (step 2)"] == "advice"

    def test_too_old_rollouts(self, tmp_path: Path) -> None:
        texts = {claim["text"]: claim["level"] for claim in recorded(tmp_path, "stale")}
        assert texts["reward fell from its best of 0.508 (step 17) to 0.0694"] == "advice"
        assert texts["trainer and generators drift apart: KL up to 1.37 nats per token (step 21)"] == "advice"

    @pytest.mark.parametrize(
        ("solved", "held_out", "doubt"),
        [
            ((0.8, 0.2), None, "while fewer answers are right: the reward may be hacked"),
            ((0.2, 0.8), None, None),
            ((0.5, 0.5), None, None),
            ((0.8, 0.2), (0.5, 0.52), None),
            ((0.8, 0.9), (0.9, 0.5), "while held-out accuracy fell: the reward may be hacked"),
            ((0.2, 0.8), (0.2, 0.22), "while held-out accuracy does not follow: the run may memorize its prompts"),
            ((0.2, 0.8), (0.8, 0.82), None),
            ((0.2, 0.8), (0.2, 0.8), None),
        ],
    )
    def test_what_speaks_against_a_reward_that_rises(
        self, tmp_path: Path, solved: tuple[float, float], held_out: tuple[float, float] | None, doubt: str | None
    ) -> None:
        """Right answers; not how long responses are, nor how they end, which is said beside it."""
        folder, (first, last) = make_run(tmp_path / "made", steps=0, end=None), solved
        rows = [
            step_row(
                step, reward_mean=0.02 * step, response_tokens_mean=100 - 2 * step, truncated_share=0.02 * step,
                solve_rate=first + (last - first) * step / 40 + 0.01 * (step % 2),
            )
            for step in range(1, 41)
        ]  # fmt: skip
        write_rows(folder / "metrics.jsonl", rows)
        if held_out:
            write_rows(folder / "metrics.jsonl", [eval_row(0, held_out[0]), eval_row(40, held_out[1])])
        found = findings(read(folder))
        doubted = [claim for claim in found if " while " in claim["text"]]
        if doubt is None:
            assert not doubted
        else:
            assert doubted == found[:1], "first"
            assert found[0]["text"].endswith(doubt) and (found[0]["chart"], found[0]["level"]) == ("reward", "advice")
        assert {"length", "truncated"} <= {claim["chart"] for claim in found}

    def test_a_reward_that_rises_alone_is_no_success_and_no_fraud(self, tmp_path: Path) -> None:
        """By something else than right answers, which stay what they were, in training as well."""
        folder = make_run(tmp_path / "made", steps=0, end=None)
        write_rows(folder / "metrics.jsonl", [eval_row(0, 0.2), eval_row(40, 0.21)])
        write_rows(folder / "metrics.jsonl", [step_row(step, reward_mean=0.01 * step) for step in range(1, 41)])
        accuracy, reward, *_ = findings(read(folder))
        assert accuracy["text"].startswith("held-out accuracy did not change beyond its error")
        assert reward["text"].startswith("reward rose")
        assert (accuracy["level"], reward["level"]) == ("note", "note")

    def test_what_is_partly_lost_rose_all_the_same(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        levels = [0.3] * 20 + [0.9] * 40 + [0.7] * 40
        rows = [step_row(step, reward_mean=level + 0.01 * (step % 2)) for step, level in enumerate(levels, start=1)]
        write_rows(folder / "metrics.jsonl", rows)
        (claim,) = (claim for claim in findings(read(folder)) if claim["chart"] == "reward")
        assert re.fullmatch(r"reward rose from .*, below its best of 0\.90\d \(step \d+\)", claim["text"]), claim
        assert claim["level"] == "good"

    @pytest.mark.parametrize("steps", [6, 40, 1000])
    def test_one_that_still_rises_has_lost_nothing(self, tmp_path: Path, steps: int) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        write_rows(folder / "metrics.jsonl", [step_row(step, reward_mean=0.005 * step) for step in range(1, steps + 1)])
        (claim,) = (claim for claim in findings(read(folder)) if claim["chart"] == "reward")
        assert claim["text"].startswith("reward rose from 0.")
        assert "best" not in claim["text"]

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_has_no_best(self, tmp_path: Path, seed: int) -> None:
        folder, chance = make_run(tmp_path / "made", steps=0, end=None), random.Random(seed)
        rows = [step_row(step, reward_mean=chance.gauss(0.5, 0.1)) for step in range(1, 301)]
        write_rows(folder / "metrics.jsonl", rows)
        assert not any("its best" in claim["text"] for claim in findings(read(folder)))


def test_every_option_in_an_advice_exists() -> None:
    """An advice may not send anybody to an option that there is not."""
    source = (PAGE / "findings.py").read_text("utf-8")
    named = set(re.findall(r"\b(trainer|rollout|reference|generator|shaping)\.([a-z_]+)\b", source))
    assert len(named) > 6
    for section, option in named:
        options = getattr(RunConfig.model_fields[section].annotation, "model_fields", ())
        assert option in options, f"{section}.{option}"
