"""llamarl from Python: a script's functions and rows become a run, an evaluation, answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import llamarl
from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.config.data import DataConfig
from llamarl.controller.supervision import PausableClockLoop, run_pausable
from llamarl.data.tokenizer import Tokenizer
from llamarl.observability import spans
from llamarl.run.preview import check_functions
from llamarl.run.python_inputs import sources_of
from tests.end_to_end.tiny import ROOT, SOMETIME_S, environment, llamarl_here, make_model, write_toml
from tests.nightly import nightly
from tests.python.rewards import brevity, ends_right

ROWS = [{"question": f"{a} + {b}", "answer": str(a + b), "hint": b} for a in range(8) for b in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("python") / "model")


@pytest.fixture
def toml(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_toml(tmp_path, model)


INLINE: dict[str, Any] = {"cluster": {"kind": "inline"}, "steps": 2}


def test_a_run_of_own_rows_and_functions(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {ends_right: 1.0, brevity: 0.5}
    run = llamarl.train(toml, reward=weights, data=ROWS, eval_data=ROWS[:4], **INLINE)
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert {row["extra.reward.brevity"] < 0 <= row["extra.reward.ends_right"] for row in run.metrics()} == {True}
    assert np.isfinite(run.metrics()[0]["grad_norm"])
    assert [row["num_prompts"] for row in run.evals()] == [4, 4]
    assert (run.summary["steps"], run.config.reward.weights) == (2, [1.0, 0.5])
    rollouts = list(run.rollouts())
    assert len(rollouts) == 2 * 2 * 3 and {row["answer"] for row in rollouts} <= {row["answer"] for row in ROWS}
    again = llamarl.open_run("runs/tiny")
    assert again.metrics() == run.metrics() and "2 steps" in repr(again)
    longer = llamarl.train(toml, reward=weights, data=ROWS, eval_data=ROWS[:4], resume=True, **INLINE | {"steps": 3})
    assert [row["step"] for row in longer.metrics()] == [1, 2, 3]
    num_evals = len(longer.evals())
    done = llamarl.train(toml, reward=weights, data=ROWS, eval_data=ROWS[:4], resume=True, **INLINE | {"steps": 3})
    assert [row["step"] for row in done.evals()[num_evals:]] == [3], "once is enough of the same weights"
    assert "the run is finished, all 3 steps are done" in capsys.readouterr().err
    assert done.metrics() == longer.metrics()
    with pytest.raises(llamarl.ConfigError, match=r"config\.toml"):
        llamarl.open_run("runs")


@nightly("runs of their own; by day a run of own rows and functions is made and answered")
def test_the_record_starts_it_again_without_python(toml: Path) -> None:
    """What was given is in files that the settings name."""
    secret = 7

    def closure(answer: str, response: str) -> float:
        return secret + len(response) * 0.0

    run = llamarl.train(toml, reward=closure, data=ROWS, **INLINE)
    (part,) = run.config.reward.parts
    pickle = Path(part.options["file"])
    assert part.options["curve"] == "closure" and pickle.parent == Path("runs/.given")
    assert "return secret" in pickle.with_suffix(".py").read_text()
    assert "secret" not in run.path.joinpath("config.toml").read_text()
    command = ("train", "runs/tiny/config.toml", "--resume", "--steps=3")
    done = llamarl_here(*command)
    assert done.returncode == 0, done.stderr
    assert {row["reward_mean"] for row in run.metrics()} == {7.0}
    pickle.unlink()
    done = llamarl_here(*command)
    assert done.returncode == 2 and "is not there; start the run from Python again" in done.stderr


def test_settings_win_as_on_the_command_line(toml: Path) -> None:
    from llamarl.api import _resolved

    tables = {"model": {"path": "m"}, "data": {"train": "jsonl"}, "trainer": {"loss": "aipo", "threads": 2}}
    for base in (tables, load_config(tables)):
        settings = {"trainer": {"learning_rate": 1e-5}, "trainer.loss": {"name": "grpo"}, "steps": 7}
        config = _resolved(base, settings)
        assert (config.steps, config.trainer.learning_rate, config.trainer.threads) == (7, 1e-5, 2)
        assert config.trainer.loss.name == "grpo"
        assert _resolved(base, {"trainer.loss.rho": 8.0}).trainer.loss.options == {"rho": 8.0}
    assert tables["trainer"] == {"loss": "aipo", "threads": 2}, "what the user holds stays as it is"
    with pytest.raises(llamarl.ConfigError, match="did you mean `learning_rate`"):
        _resolved(tables, {"trainer.learning_rte": 1})
    assert isinstance(_resolved(toml, {}), RunConfig)


def test_rows_of_other_libraries(tmp_path: Path) -> None:
    from llamarl.run.python_inputs import source_of

    class Frame:
        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            assert orient == "records"
            return [{"question": "q", "answer": np.int64(3), "vector": np.arange(2)}]

    class Dataset:
        def to_list(self) -> list[dict[str, Any]]:
            return [{"question": "q", "answer": "a"}]

    for rows, expected in (
        (Frame(), {"question": "q", "answer": 3, "vector": [0, 1]}),
        (Dataset(), Dataset().to_list()[0]),
    ):
        source = source_of(rows, tmp_path, "data.train")
        assert json.loads(Path(source["path"]).read_text()) == expected and source["name"] == "jsonl"
    assert source_of(iter(Dataset().to_list()), tmp_path, "data.train") == source, "the same rows are there once"
    assert source_of("running_total", tmp_path, "data.train") == {"name": "running_total"}
    for rows, cause in (
        (3, "data.train is a int; give rows"),
        ([], "has no rows"),
        ([["question"]], r"row 0 is \['question'\]; each row is a dict"),
        ([{"question": object()}], "has a value that JSON lacks"),
    ):
        with pytest.raises(llamarl.ConfigError, match=cause):
            source_of(rows, tmp_path, "data.train")


NAMED = """
import contextlib, enum, sys
from pathlib import Path
from llamarl.run.python_inputs import reward_settings
{above}
LIMITS, WORDS = {{"low": 1, "high": {high}}}, {{"one", "two", "three", "four"}}
class Unit(enum.Enum):
    METER = 1
class Scale:
    def __init__(self, unit): self.unit = unit
    def __call__(self, response): return sum(word in {{"alpha", "beta", "gamma", "delta"}} for word in WORDS)
scale = Scale(Unit.METER)
def helper(text): return helper(text[1:]) if len(text) > LIMITS["high"] else scale(text)
def reward(response, **row):
    try:
        return helper(response)
    except ValueError:
        return 0.0
for one in (reward, scale, lambda response: helper(response)):
    print(Path(reward_settings(one, Path("runs"))["parts"][0]["file"]).name.partition("-")[0])
{below}
"""


@nightly("runs of their own; by day a run of own rows and functions is made and answered")
def test_a_function_is_known_by_what_it_does(tmp_path: Path) -> None:
    """A script that is changed elsewhere, or a kernel that is started again, goes on with the same reward; else the
    steps since the last checkpoint would be lost."""
    monarch = "with contextlib.suppress(ImportError):\n    import monarch._src.actor.pickle  # who changes cloudpickle"
    texts = (
        NAMED.format(above="", below="", high=2),
        NAMED.format(above=f"{monarch}\n\n", below="print(end='')  # steps=20, resume=True", high=2),
        NAMED.format(above="", below="", high=3),
    )
    found = []
    for number, text in enumerate(texts):
        (script := tmp_path / f"cell_{number}.py").write_text(text)
        own = environment() | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(number + 1)}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=own, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    spawned = "from multiprocessing.spawn import _fixup_main_from_path as run; run('cell_0.py')"
    own = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", spawned], capture_output=True, text=True, env=own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, elsewhere, other = found
    assert first == elsewhere == done.stdout.split() and len(set(first)) == 3
    assert other[0] != first[0] and other[1] == first[1], "a value that a helper reads is part of it"


SWEEP = """
import multiprocessing, os, sys
import llamarl

def reward(prompt, response, answer, **row):
    return helper(response)

def helper(text):
    return len(text) % 2

def one(name):
    try:
        llamarl.train("tiny.toml", reward=reward, name=name, steps=1, cluster={"kind": "inline"})
    except llamarl.ConfigError as error:
        print(name, "refused", error)
        os._exit(3)

if __name__ == "__main__":
    processes = [multiprocessing.get_context("spawn").Process(target=one, args=("spawned",))]
    processes[0].start(); processes[0].join()
    one("parent")
    processes += [multiprocessing.get_context("fork").Process(target=one, args=("forked",))]
    processes[1].start(); processes[1].join(60)
    print([process.exitcode for process in processes])
"""


@nightly("a script with processes runs below")
def test_a_sweep_in_processes_of_its_own(toml: Path) -> None:
    """Spawned processes train as the script itself does; a forked one, whose threads are gone, is refused at once."""
    Path("sweep.py").write_text(SWEEP)
    own = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "sweep.py"], capture_output=True, text=True, env=own, timeout=SOMETIME_S)
    assert done.stdout.splitlines()[-1:] == ["[0, 3]"], done.stdout + done.stderr
    assert "forked refused" in done.stdout and "spawn" in done.stdout
    assert not Path("runs/forked").exists()


def test_functions_that_cannot_be_used(toml: Path) -> None:
    lock = __import__("threading").Lock()

    def locked(response: str) -> float:
        return float(lock.locked())

    def broken(response: str) -> float:
        return 1 / 0

    for reward, cause in (
        (locked, "the reward locked cannot go to another process: TypeError"),
        (3, "reward = 3 is not a function"),
        (broken, r"tried on row .* ZeroDivisionError: division by zero \(line \d+ of .*test_api.py: `return 1 / 0`\)"),
        ("no_such", "`reward.parts = 'no_such'` is unknown"),
    ):
        with pytest.raises(llamarl.ConfigError, match=cause):
            llamarl.train(toml, reward=reward, data=ROWS, **INLINE)
    assert not Path("runs/tiny").exists()


def test_a_mistake_is_one_sentence_without_frames_of_the_package(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is named by its number, and no digest of a file. What a user's module raised stays as the cause."""
    monkeypatch.syspath_prepend(".")
    Path("raises.py").write_text("raise OSError('no disk')\n")
    rows = [*ROWS, {"question": 3, "answer": "1"}]
    for settings, cause in (
        ({"data": rows}, rf"row {len(ROWS)}: .*question"),
        ({"reward": lambda response: 1 / 0, "data": ROWS}, r"reward.parts: tried on row 0 "),
        ({"reward": "raises:reward"}, "no disk"),
        ({"trainer.learning_rate": -1}, "trainer.learning_rate = -1"),
    ):
        with pytest.raises(llamarl.ConfigError, match=cause) as raised:
            llamarl.train(toml, **(INLINE | settings))
        assert not re.search(r"[0-9a-f]{32}", str(raised.value)), raised.value
        assert len(traceback.extract_tb(raised.value.__traceback__)) == 2, "the caller's frame, and the decorator's"
        shown = "".join(traceback.format_exception(raised.value))
        assert ("another exception" in shown) is False and ("raises.py" in shown) == (cause == "no disk")


def test_a_slow_start_says_where_it_is(
    toml: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_slowly(*_: object) -> None:
        time.sleep(0.3)
        raise ConfigError("that is all")

    monkeypatch.setattr(spans, "DELAY_S", 0.05)
    monkeypatch.setattr(Tokenizer, "__init__", read_slowly)
    calls: list[Callable[[], object]] = [
        lambda: llamarl.train(toml, **INLINE), lambda: llamarl.evaluate(model, ROWS, reward=ends_right),
        lambda: llamarl.generate(model, ["one"]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(llamarl.ConfigError, match="that is all"):
            call()
        assert "llamarl: still reading the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [False, True])
def test_an_interrupt_at_the_start_ends_in_one_sentence(
    toml: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llamarl.run.prepare.looked_ahead", interrupted)
    monkeypatch.setattr("llamarl.run.prepare.check_start", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt, match="before the run started") as raised:
        llamarl.train(toml, resume=resume, **INLINE)
    assert ("resume=True" in str(raised.value)) == resume
    assert len(traceback.extract_tb(raised.value.__traceback__)) == 2 and raised.value.__cause__ is None


def test_an_interrupt_in_a_run_says_how_to_go_on(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(coroutine: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("llamarl.run.train.run_pausable", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"resume=True.*runs/tiny"):
        llamarl.train(toml, **INLINE)


def test_an_evaluation_and_answers(toml: Path, model: Path) -> None:
    limits: dict[str, Any] = {"rollout": {"max_new_tokens": 6}}
    found = llamarl.evaluate(model, ROWS[:3], reward=ends_right, **limits)
    assert found.metrics.num_prompts == 3 and [row["answer"] for row in found.responses] == ["0", "1", "2"]
    several = llamarl.evaluate(model, config=toml, eval={"samples": 2, "max_prompts": 4}, **limits)
    assert (several.metrics.k, len(several.responses)) == (2, 8)
    with pytest.raises(llamarl.ConfigError, match="there are no problems"):
        llamarl.evaluate(model)
    rows = llamarl.generate(model, ["one", "two"], eval={"samples": 2}, **limits)
    assert [(row["number"], row["index"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(0 < row["num_tokens"] <= 6 for row in rows)


@nightly("runs of their own; by day a run of own rows and functions is made and answered")
def test_an_evaluation_says_what_could_not_be_judged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Python, where nothing else is printed, and by a command that prints JSON."""

    def broken(response: str) -> float:
        return 1 / 0

    def other_names(text: str) -> float:
        return 1.0

    limits: dict[str, Any] = {"rollout": {"max_new_tokens": 6}, "output": tmp_path}
    for reward, cause in ((broken, "broken: ZeroDivisionError: division by zero"), (other_names, "other_names: ")):
        found = llamarl.evaluate(model, ROWS[:3], reward=reward, **limits)
        assert (found.metrics.num_invalid, len(found.responses)) == (3, 3)
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "the first prompt: '" not in line]
        assert said.startswith(f"warning: held-out: 3 of 3 invalid: {cause}")
    assert llamarl.evaluate(model, ROWS[:3], reward=ends_right, **limits).metrics.num_invalid == 0
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:3]))
    words = ("eval", model, tmp_path / "rows.jsonl", "--rollout.max_new_tokens", "6")
    file = next(tmp_path.glob(".given/*.pickle"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    words += ("--reward.parts", f"[{{name = 'function', file = '{file}', digest = '{digest}'}}]")
    done = llamarl_here(*words)
    assert " of 3 invalid: the reward function: " in done.stdout and "warning" not in done.stderr
    done = llamarl_here(*words, "--json")
    assert json.loads(done.stdout)["num_invalid"] == 3
    assert "warning: held-out: 3 of 3 invalid: the reward function: " in done.stderr


@nightly("a run of its own; by day exports are read in tests/models and checkpoint")
def test_what_was_trained_is_exported(toml: Path) -> None:
    run = llamarl.train(toml, reward=ends_right, data=ROWS, eval_data=ROWS[:4], **INLINE)
    folder = run.export()
    assert folder == run.path / "export" and run.export("chosen", step=2) == Path("chosen")
    found = llamarl.evaluate(folder, ROWS[:4], reward=ends_right, config=run.path / "config.toml")
    assert isinstance(found, llamarl.EvalRecord) and found.metrics.num_prompts == 4
    with pytest.raises(llamarl.ConfigError, match=r"^merge=True is for adapters, and this run trained all weights"):
        run.export(merge=True)
    with pytest.raises(llamarl.ConfigError, match=r"step 7 has no checkpoint in .*; there are 2$"):
        run.export(step=7)
    for nowhere in ("/proc/x", "/proc/x/y", f"{toml}/x"):
        with pytest.raises(llamarl.ConfigError, match=rf"^cannot write {nowhere}: .*; name a folder that can be made$"):
            run.export(nowhere)
    of_run = llamarl.evaluate(run.path, ROWS[:4], reward=ends_right)
    assert isinstance(of_run, llamarl.EvalRecord) and of_run.responses == found.responses
    asked = {"rollout": {"max_new_tokens": 6}, "eval": {"temperature": 0.0}}
    (row,), (same,) = (llamarl.generate(path, ["1 + 1"], **asked) for path in (run.path, folder))
    assert row == same


def test_where_a_loop_runs_already(toml: Path) -> None:
    """As in a notebook: the run has a thread of its own."""

    async def cell() -> llamarl.RunRecord:
        return llamarl.train(toml, data=ROWS, reward="exact", **INLINE)

    assert len(asyncio.run(cell()).metrics()) == 2

    async def fails() -> None:
        raise LookupError("of its own")

    async def outer() -> None:
        run_pausable(fails())

    with pytest.raises(LookupError, match="of its own"):
        asyncio.run(outer())


SCRIPT = """
import llamarl
FACTOR = 2.0
def helper(text): return FACTOR * len(text)
def reward(response, **row): return helper(response)
run = llamarl.train({toml!r}, reward=reward, data=[{{"question": "q", "answer": "a"}}] * 4, steps=2)
print(sorted({{row["reward_mean"] > 0 for row in run.metrics()}}), run.config.cluster.kind)
"""


@nightly("runs of their own; by day a run of own rows and functions is made and answered")
def test_a_script_without_a_guard_and_processes(toml: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(toml=str(toml)))
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[True] monarch\n")


def test_public_names() -> None:
    assert {"train", "evaluate", "generate", "open_run", "ConfigError"} <= set(llamarl.__all__)
    assert all(getattr(llamarl, name) for name in llamarl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        llamarl.trian  # noqa: B018


def test_prompts_of_any_kind(model: Path) -> None:
    class Series:
        """Labels are not places."""

        def __iter__(self) -> Any:
            return iter(["one", "two"])

        def __getitem__(self, label: int) -> str:
            return "another"

    limits: dict[str, Any] = {"rollout": {"max_new_tokens": 2}}
    for prompts in (Series(), (text for text in ("one", "two"))):
        assert [row["prompt"] for row in llamarl.generate(model, prompts, **limits)] == ["one", "two"]
    with pytest.raises(llamarl.ConfigError, match=r"model = 'None'"):
        llamarl.generate(None, ["Hello"], **limits)  # pyrefly: ignore[bad-argument-type]
    for prompts in ("Hello", None, [], ["a hole of a table:", None]):
        with pytest.raises(llamarl.ConfigError, match="give a list of texts, at least one"):
            llamarl.generate(model, prompts, **limits)
    rows = (row for row in ROWS[:2])
    assert llamarl.evaluate(model, rows, reward=ends_right, **limits).metrics.num_prompts == 2


def test_settings_of_python(toml: Path, tmp_path: Path) -> None:
    from llamarl.api import _resolved

    (tmp_path / "demo").mkdir()
    demo = _resolved("demo", {"output": tmp_path / "o"})
    assert (demo.name, demo.output) == ("demo", str(tmp_path / "o")), "a folder is no file of settings"
    own = _resolved("demo", {"data.train": {"name": "jsonl", "path": "x.jsonl"}})
    assert own.data.train.options == {"path": "x.jsonl"}, "another part brings its own options"
    assert _resolved(load_config("demo"), {"recipe": "grpo"}).trainer == _resolved("demo", {"recipe": "grpo"}).trainer
    several = {"data": {"train": [{"name": "jsonl", "path": "x.jsonl"}, {"name": "jsonl", "path": "y.jsonl"}]}}
    mixed = _resolved(several | {"model": {"path": "m"}}, {"data.train.1.weight": 3.0, "data.train.0.label": "z"})
    assert [(one.label, one.weight) for one in mixed.data.sources] == [("z", 1.0), ("y", 3.0)]
    with pytest.raises(llamarl.ConfigError, match="the list has no entry '2'; it has 2"):
        _resolved(several | {"model": {"path": "m"}}, {"data.train.2.weight": 3.0})
    lora = _resolved(load_config(toml).model_dump(), {"trainer": {"lora": {"rank": 8}}}).trainer.lora
    assert lora and lora.rank == 8


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        (None, {}, "config = None is not a run; give the path of a TOML file, or its tables"),
        ("demo", {"output": "/proc/x", "data": ROWS}, "cannot write to /proc/x/.given: No such file or"),
        ("demo", {"output": 3}, "output = 3 is not a path; give the folder of runs as text"),
        ("demo", {"trainer": {"learning_rate": 1e-5}, "trainer.learning_rate": 1e-4},
         "`trainer.learning_rate` is given twice, by 'trainer' and by 'trainer.learning_rate'; give one of them"),
        ("demo", {"data": ROWS, "data.train": "running_total"}, "`data.train` and data="),
        ("demo", {"eval_data": ROWS, "data.eval.path": "x"}, "`data.eval.path` and eval_data="),
        ({"data": {"train": "jsonl"}}, {}, "`model.path` is missing; set it"),
        ("demo", {"resume": True, "overwrite": True}, "resume=True and overwrite=True contradict each other; give"),
        ("demo", {"resume": True, "name": "no--name"}, "resume=True: there is no run in runs/no--name; start it w"),
        ("demo", {"model": "base"}, '`model = \'base\'` is a section, not a value; set its settings, as model.path'),
        ({"model": {"path": "m"}, "data": {"train": "jsonl"}, "reward": "exact"}, {"reward": "exact"},
         "unknown option `reward.name`"),
        ("demo", {"reward": "exact", "reward.parts": ["math"]}, "`reward.parts` and reward="),
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing_or_two_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, given: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(llamarl.ConfigError, match=re.escape(says)):
        llamarl.train(config, **given)
    assert not (tmp_path / "runs/demo").exists()


@nightly("runs of their own; by day a run of own rows and functions is made and answered")
def test_home_is_where_a_path_of_python_says(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    data = {"name": "file", "path": "~/rows.jsonl"}
    run = llamarl.train("~/tiny.toml", reward=lambda answer: 1.0, data=data, output="~/mine", **INLINE)
    assert run.path == tmp_path / "mine/tiny" and (tmp_path / "mine/.given").is_dir()
    assert llamarl.open_run("~/mine/tiny").export("~/exported") == tmp_path / "exported"
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "1 2"}, "data.train, row 2: `answer` is missing"),
        ({"id": "x", **ROWS[0]}, "data.train, row 2: id 'x' is also the id of row 1; give each row a different"),
        ({"question": "a" * (1 << 20), "answer": "1"}, "data.train, row 2 is too long: a row may have 1,048,576"),
        ({"question": "1 2 3 " * 2000, "answer": "3"}, "data.train: the prompt of row 2 has "),
    ],
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_row_of_python_is_named_by_its_number(
    tmp_path: Path, toml: Path, row: dict[str, str], says: str, is_mixed: bool
) -> None:
    """No file is, which nobody has named."""
    rows = [ROWS[0], {"id": "x", **ROWS[0]}, row]
    settings = INLINE | {"output": tmp_path, "data.overlong_prompts": "refuse"}
    with pytest.raises(llamarl.ConfigError) as refused:
        llamarl.train(toml, data={"a": ROWS, "b": rows} if is_mixed else rows, **settings)
    says = f"source 'b': {says}" if is_mixed and " is too long" not in says else says
    assert str(refused.value).replace("train.b", "train").startswith(says)


def test_rows_with_holes_and_rewards_with_faults(tmp_path: Path) -> None:
    from llamarl.run.python_inputs import reward_settings, source_of

    source = source_of([{"question": "q", "answer": "a", "level": float("nan")}], tmp_path, "data.train")
    assert json.loads(Path(source["path"]).read_text())["level"] is None
    for rows in ([{"question": "\ud800"}], [{"question": float("inf")}]):
        with pytest.raises(llamarl.ConfigError, match="has a value that JSON lacks"):
            source_of(rows, tmp_path, "data.train")
    for reward in ({"model": {}}, {ends_right: "x"}):
        with pytest.raises(llamarl.ConfigError, match="with a number for the weight of each"):
            reward_settings(reward, tmp_path)

    class Judge:
        async def __call__(self, response: str) -> float:
            return 1.0

    (part,) = reward_settings(Judge(), tmp_path)["parts"]
    assert part["is_async"] and part["curve"] == "Judge"


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    for text in (None, ""):
        if text is not None:
            (tmp_path / "metrics.jsonl").write_text(text)
        run = llamarl.open_run(tmp_path)
        assert run.metrics() == run.evals() == [] and run.summary == {}


def test_the_lock_goes_where_a_start_fails(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarl.parts.page import joint

    def fails(folder: Path) -> None:
        raise LookupError("no port")

    with monkeypatch.context() as patched:
        patched.setattr(joint, "watching", fails)
        with pytest.raises(LookupError) as kept:
            llamarl.train(toml, data=ROWS, reward="exact", watch=True, **INLINE)
    assert kept.value, "whose traceback a notebook keeps"
    assert len(llamarl.train(toml, data=ROWS, reward="exact", overwrite=True, **INLINE).metrics()) == 2


def test_an_interrupt_before_anybody_listens() -> None:
    loop, heard = PausableClockLoop(), list[str]()
    loop.interrupt()
    loop.listen(lambda: heard.append("now"))
    assert heard == ["now"]
    loop.interrupt()
    assert heard == ["now", "now"]
    loop.close()


def test_a_trial_asks_nobody_else(toml: Path) -> None:
    """Other parts of the reward may cost, and a row may have no answer."""
    config = load_config(toml, settings={"reward.parts": [f"{__name__}:first_word", "no_such_part"]})
    rows = [SimpleNamespace(prompt_id="a", answer=""), SimpleNamespace(prompt_id="b", answer="x", text="", metadata={})]
    check_functions(config, rows[:1])
    check_functions(config, rows)


def first_word(response: str) -> bool:
    return response.split(maxsplit=1)[0] == "x"


@nightly("runs of their own; by day a run of own rows and functions is made and answered")
def test_several_data_sets_are_mixed(toml: Path) -> None:
    """By label, each with rewards of its own, functions too."""
    calm = {"data": ROWS[8:20], "weight": 3, "reward": {brevity: 1.0, ends_right: 0.5}, "max_new_tokens": 5}
    data = {"sums": pandas_like(ROWS[:8]), "calm": calm}
    run = llamarl.train(toml, reward=ends_right, data=data, **INLINE | {"steps": 4})
    rollouts = list(run.rollouts())
    assert Counter(row["source"] for row in rollouts) == {"sums": 2 * 3, "calm": 6 * 3}
    assert {row["prompt_id"].partition("/")[0] == row["source"] for row in rollouts} == {True}
    assert max(len(row["token_ids"]) for row in rollouts if row["source"] == "calm") == 5
    assert max(len(row["token_ids"]) for row in rollouts if row["source"] == "sums") == 12
    assert {row["reward"] >= 0 for row in rollouts if row["source"] == "sums"} == {True}
    assert {row["reward"] < 0 for row in rollouts if row["source"] == "calm" and row["response"]} == {True}
    assert [source.label for source in run.config.data.sources] == ["sums", "calm"]


def pandas_like(rows: list[dict[str, Any]]) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda orient: rows)


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        ([ROWS[:2], ROWS[2:4]], ["data-1", "data-2"]),
        ([{"data": ROWS[:2], "label": "x"}, {"data": {"name": "running_total"}}], ["x", "data-2"]),
        ({"a": {"name": "running_total", "count": 3}, "b": ROWS[:2]}, ["a", "b"]),
        ({"a": {"name": "running_total", "weight": 3, "reward": ends_right}, "b": ROWS[:2]}, ["a", "b"]),
        ([{"name": "jsonl", "path": "x.jsonl", "weight": 3}, ROWS[:2]], ["x", "data-2"]),
        ([{"name": "file", "path": f"{one}.csv", "question": "q", "answer": "a"} for one in "xy"], ["x", "y"]),
        ([{"data": ROWS[:2], "reward": {"parts": ["gsm8k"], "weights": [2.0]}}], ["data-1"]),
        ([{"data": {"of": "a row"}, "question": "q", "answer": "a"}], []),
        ([{"name": "of a row", "question": "q", "answer": "a"}], []),
        ([{"data": "a row of its own", "question": "q", "answer": "a"}], []),
        ([{"data": "a row of its own", "name": "n", "prompt": "q", "answer": "a"}], []),
        ({"name": "running_total", "count": 3}, []),
        (ROWS[:2], []),
    ],
)  # fmt: skip
def test_what_is_several_data_sets(tmp_path: Path, data: Any, labels: list[str]) -> None:
    found = sources_of(data, tmp_path, "data.train")
    sources = DataConfig.model_validate({"train": found}).sources
    assert [source.label for source in sources] == labels
    assert isinstance(found, list) == bool(labels)


def test_splits_of_one_data_set_are_no_mixture(tmp_path: Path) -> None:
    """Its test split would be trained on."""

    class DatasetDict(dict):  # as the package `datasets` has it
        pass

    splits = DatasetDict(train=[{"question": "1+1?", "answer": "2"}], test=[{"question": "2+2?", "answer": "4"}])
    with pytest.raises(ConfigError, match=r"data.train is a DatasetDict of the splits train, test; give one of them"):
        sources_of(splits, tmp_path, "data.train")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("rows.jsonl", "data.train = 'rows.jsonl' is a file; give {'name': 'file', 'path': 'rows.jsonl'}"),
        ({"a": {"weight": 2.0}, "b": ROWS}, "data.train.a has neither `data`, for rows, nor `name`, for a source"),
        ({"path": "rows.jsonl"}, "data.train has neither `data`, for rows, nor `name`, for a source; it has path"),
        ({"a": ROWS, "b": []}, "data.train.b has no rows; give at least one"),
        ({"Größe": ROWS}, "`data.train.0.label = 'Größe'`: it names files and curves; begin with a letter"),
    ],
)
def test_data_that_are_none(toml: Path, data: Any, says: str) -> None:
    with pytest.raises(llamarl.ConfigError) as refused:
        llamarl.train(toml, reward=ends_right, data=data, **INLINE)
    assert says in str(refused.value)


def test_a_process_without_a_console_trains(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    run = llamarl.train(toml, **INLINE | {"steps": 1})
    assert len(run.metrics()) == 1


def test_arguments_that_nobody_can_use(toml: Path, model: Path) -> None:
    itself: dict[str, Any] = {"question": "q", "answer": "a"}
    itself["itself"] = itself
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    settings: dict[str, Any] = {}
    settings["trainer"] = settings
    data = {"train": [{"source": 3}]}
    for call, option in (
        (lambda: llamarl.train(toml, data=[itself], **INLINE), "data.train"),
        (lambda: llamarl.train(toml, data=[itself | {"itself": deep}], **INLINE), "data.train"),
        (lambda: llamarl.train(toml, **settings), "nested"),
        (lambda: llamarl.train({"model": {"path": "m"}, "data": data}), "data.train.0.source"),
        (lambda: llamarl.train({"model": {"path": "m"}, "data": {"train": [{"source": None}]}}), "data.train.0.source"),
        (lambda: llamarl.train("a\0b"), "NUL"),
        (lambda: llamarl.train(toml, data=ROWS, output="a\0b"), "output"),
        (lambda: llamarl.generate(model, ["a", "\udfff"]), "prompts"),
        (lambda: llamarl.generate(model, 3), "prompts"),  # type: ignore[arg-type]
        (lambda: llamarl.open_run(3), "path = 3"),  # type: ignore[arg-type]
        (lambda: llamarl.open_run(None), "path = None"),  # type: ignore[arg-type]
        (lambda: llamarl.open_run("a\0b"), "path"),
        (lambda: llamarl.open_run("a" * 5000), "path"),
    ):
        with pytest.raises(ConfigError, match=re.escape(option)):
            call()


@pytest.mark.parametrize("name", ["PostInit", "PostExit", "Close", "NoType"])
def test_a_reward_that_cannot_be_made_is_named(toml: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.parts.*{name}"):
        llamarl.train(toml, reward=f"tests.python.broken_rewards:{name}", **INLINE)
