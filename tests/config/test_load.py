"""The loader: what it accepts, and the one sentence that it says otherwise."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import pytest
from pydantic import ValidationError

from llamarl import config
from llamarl.config import ConfigError, build, dump_toml, load_config, load_recorded, load_sft_config
from llamarl.config.elsewhere import DROPPED
from llamarl.config.load import RECORD, flat_settings, last_names, tables, translated
from llamarl.config.schema import GeneratorConfig, RunConfig
from llamarl.config.section import Section
from tests.config.conftest import MINIMAL, Write

VLLM = ("--generator.backend=vllm", "--generator.vllm.python=python3")


def _message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert "\n" not in str(error.value), "one sentence"
    return str(error.value)


def test_defaults_fill_in(minimal: Path) -> None:
    config = load_config(minimal)
    assert (config.steps, config.trainer.loss.name, config.rollout.max_staleness) == (100, "aipo", 1)
    assert config.data.train.options == {"path": "train.jsonl"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "unknown option `stepz`; did you mean `steps`?"),
        ("zzz = 3", "unknown option `zzz`; known here: name, output, seed, steps, recipe, model, data"),
        ("[trainer]\nlearning_rat = 1.0", "unknown option `trainer.learning_rat`; did you mean `learning_rate`?"),
        ("[trainer]\nlr = 1.0", "unknown option `trainer.lr`; did you mean `trainer.learning_rate`?"),
        ("[rollout]\nxy = 1.0", "unknown option `rollout.xy`; known here: "),
        ("x = 1.0", "unknown option `x`; known here: "),
        ("steps = 'ten'", "`steps = 'ten'`: input should be a valid integer"),
        ("steps = true", "`steps = True`: input should be a valid integer"),
        ("steps = 1.5", "`steps = 1.5`: input should be a valid integer"),
        ("steps = 0", "`steps = 0`: input should be greater than or equal to 1"),
        ("name = 7", "`name = 7`: input should be a valid string; put quotes around it"),
        ("name = '../elsewhere'", "`name = '../elsewhere'`: it names files and curves; begin with a letter"),
        ("rollout = 5", "`rollout = 5` is a section, not a value; set its settings, as rollout.prompts_per_step = 5"),
        (
            "trainer.lora = 8",
            "`trainer.lora = 8` is a section, not a value; set its settings, as trainer.lora.rank = 8",
        ),
        (
            "trainer.loss = 4.0",
            "`trainer.loss = 4.0` does not name a component; give its name as text, or a table with its `name`",
        ),
        ("[trainer]\nlearning_rate = nan", "`trainer.learning_rate = nan`"),
        (
            "[cluster]\nkind = 'hosts'\nlisten = '[::1]:1'",
            "cluster.listen = '[::1]:1' is not address:port; give an IPv4",
        ),
        ("[cluster]\ntimeout_s = inf", "`cluster.timeout_s = inf`: input should be a finite number"),
        ("[trainer]\non_nonfinite = 'ignore'", "`trainer.on_nonfinite = 'ignore'`: input should be 'stop' or 'skip'"),
        ("[trainer]\nloss = {rho = 4.0}", "`trainer.loss.name` is missing; set it in the file or with --trainer.loss"),
        ("[reward]\nparts = []", "`reward.parts = []`: list should have at least 1 item"),
        ("[reward]\nweights = [1.0, 'two']", "`reward.weights.1 = 'two'`: input should be a valid number"),
    ],
)
def test_mistake_in_the_file_is_named(write: Write, text: str, message: str) -> None:
    assert message in _message(write(f"{text}\n{MINIMAL}"))


def test_a_section_is_no_value_wherever_it_is_given(minimal: Path, write: Write) -> None:
    said = "`model = 'base'` is a section, not a value; set its settings, as model.path = \"base\", in Python model = "
    said += '{"path": "base"}'
    assert _message(minimal, "--model", "base") == said
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, settings={"model": "base"})
    assert str(caught.value) == said
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            assert f"`{name} = 3` is a section, not a value; set " in _message(minimal, f"--{name}", "3")
    assert _message(write('model = "base"\ndata.train = "running_total"')) == said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\npath = 'm'", "`data.train` is missing; set it in the file or with --data.train VALUE"),
        ("[data]\ntrain = 'jsonl'", "`model.path` is missing; set it in the file or with --model.path VALUE"),
        ("[model]\npath = 'm'\n[data]\neval = 'jsonl'", "`data.train` is missing; set it in the file or with --data."),
        ("steps = ", "is not valid TOML"),
        ("steps = 1\nsteps = 2", "is not valid TOML"),
    ],
)
def test_incomplete_or_broken_file(write: Write, text: str, message: str) -> None:
    assert message in _message(write(text))


def test_unreadable_files(tmp_path: Path) -> None:
    assert "cannot read" in _message(tmp_path / "none.toml")
    assert "cannot read" in _message(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    assert "is not UTF-8" in _message(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.window", "5"], "rollout.window = 5 is larger than the 4 groups"),
        (["--rollout.max_active", "5"], "rollout.max_active = 5: a step or the window needs 2 groups, and more than 4"),
        (
            ["--rollout.group_size=1", "--rollout.max_attempts=3"],
            "rollout.max_attempts = 3 with rollout.group_size = 1",
        ),
        (
            ["--rollout.environment=my.world:Guess"],
            "my.world:Guess without [reward], which scores",
        ),
        (["--rollout.agent=my.agents:run"], "my.agents:run without [reward]"),
        (["--cluster.placement=colocated"], "needs rollout.max_staleness = 0, not 1"),
        (["--reward.weights=[1.0, 2.0]"], "reward.weights has 2 numbers for 1 parts; give one each"),
        (["--rollout.stop_strings=['']"], "`rollout.stop_strings.0 = ''`: string should have at least 1 character"),
        (["--generator.dtype=fp8"], "generator.dtype = 'fp8' needs a GPU; with generator.device = 'cpu' use 'int8'"),
        (
            ["--generator.kv_dtype=fp8"],
            "generator.kv_dtype = 'fp8' needs a GPU; with generator.device = 'cpu' use 'bfloat16'",
        ),
        (
            ["--generator.tensor_parallel=2", "--cluster.kind=inline"],
            "generator.tensor_parallel = 2 needs a process for each rank; use cluster.kind = 'monarch'",
        ),
        (
            ["--weight_sync.transport=p2p", "--cluster.kind=inline"],
            "weight_sync.transport = 'p2p' connects processes, and cluster.kind = 'inline' has only one",
        ),
        (["--generator.vllm.python=python3"], "generator.vllm is set but not used; set generator.backend = 'vllm'"),
        (["--generator.backend=vllm"], "generator.backend = 'vllm' needs generator.vllm.python, the interpreter of"),
        (
            [*VLLM, "--generator.dtype=int8"],
            "generator.dtype = 'int8' fails with vLLM; with generator.backend = 'vllm' use 'bfloat16' or 'float32'",
        ),
        (
            [*VLLM, "--generator.tensor_parallel=2"],
            "with generator.backend = 'vllm' use generator.vllm.arguments = ['--tensor-parallel-size', '2']",
        ),
        (
            [*VLLM, "--generator.cuda_graphs=off"],
            "with generator.backend = 'vllm' use generator.vllm.arguments = ['--enforce-eager']",
        ),
        *(
            (
                [f"--weight_sync.transport={one}", "--weight_sync.delta=true"],
                "delta = true saves nothing",
            )
            for one in ("shared_memory", "nixl")
        ),
        (
            [*VLLM, "--cluster.kind=inline"],
            "generator.backend = 'vllm' starts its own processes; use cluster.kind = 'monarch' instead of 'inline'",
        ),
    ],
)
def test_impossible_combination_is_explained(minimal: Path, overrides: list[str], message: str) -> None:
    base = ["--rollout.prompts_per_step=2", "--rollout.max_staleness=1"]
    assert message in _message(minimal, *base, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--rollout.window=4"],
        ["--rollout.group_size=1", "--trainer.advantage=tests.parts:Baseline"],
        ["--cluster.placement=colocated", "--rollout.max_staleness=0"],
        ["--reward.weights=[1.0, 2.0]", '--reward.parts=["gsm8k", "math"]'],
        ["--rollout.max_new_tokens=180000", "--rollout.segment_tokens=60000"],
        ["--generator.dtype=fp8", "--generator.device=cuda"],
        ["--generator.kv_dtype=fp8", "--generator.device=cuda"],
        [
            "--generator.dtype=int8",
            "--generator.kv_dtype=bfloat16",
            "--generator.tensor_parallel=2",
            "--weight_sync.transport=p2p",
        ],
        ["--weight_sync.transport=file", "--cluster.kind=inline"],
        [*VLLM, "--generator.dtype=bfloat16", "--generator.kv_on_update=recompute", "--rollout.segment_tokens=9"],
    ],
)
def test_neighbors_of_impossible_combinations_load(minimal: Path, overrides: list[str]) -> None:
    load_config(minimal, ["--rollout.prompts_per_step=2", "--rollout.max_staleness=1", *overrides])


def test_override_forms(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            *("--steps", "10"),
            "--trainer.learning_rate=1e-5",
            "--trainer.weight-decay=0",
            *("--data.template", "Q: {question}\n5\nA ="),
            "--name=run-7",
            '--output="7"',
            '--reward.parts=["gsm8k", {name = "math"}]',
            *("--data.eval", '{name = "jsonl", path = "a = b.jsonl"}'),
            *("--eval.temperature", "0"),
            "--model.warm_start=",
        ],
    )
    assert (config.steps, config.trainer.learning_rate, config.trainer.weight_decay) == (10, 1e-5, 0.0)
    assert config.data.template == "Q: {question}\n5\nA ="
    assert (config.name, config.output, config.model.warm_start) == ("run-7", "7", "")
    assert [part.name for part in config.reward.parts] == ["gsm8k", "math"]
    assert config.data.eval is not None
    assert config.data.eval.options == {"path": "a = b.jsonl"}


def test_text_that_only_begins_as_toml_stays_text(minimal: Path) -> None:
    assert load_config(minimal, ["--data.template", "5\nsteps = 3"]).data.template == "5\nsteps = 3"


def test_part_by_name_and_an_option(write: Write) -> None:
    path = write(f"{MINIMAL}\n[trainer]\nloss = 'aipo'")
    assert load_config(path, ["--trainer.loss.rho", "8"]).trainer.loss.options == {"rho": 8}
    both = load_config(path, ["--trainer.loss=other", "--trainer.loss.beta=0.1"]).trainer.loss
    assert (both.name, both.options) == ("other", {"beta": 0.1})


def test_options_of_a_part_may_stand_before_its_name(minimal: Path) -> None:
    """The name would replace them, and the run would train with the defaults."""
    words = ["--trainer.loss.clip", "0.1", "--trainer.loss", "ppo_clip"]
    assert load_config(minimal, words).trainer.loss.options == {"clip": 0.1}
    for settings in (
        {"trainer.loss.clip": 0.1, "trainer.loss": "ppo_clip"},
        {"trainer.loss.clip": 0.1, "trainer": {"loss": "ppo_clip", "passes": 2}},
    ):
        assert load_config(minimal, settings=settings).trainer.loss.options == {"clip": 0.1}, settings


def test_what_graphs_capture_is_said_of_cut_models_too() -> None:
    """`Engine` captures whatever model is made for generation, by how many ranks ever."""
    said = GeneratorConfig.model_fields["cuda_graphs"].description
    assert said and "`tensor_parallel`" in said and "unless" not in said


@pytest.mark.parametrize("name", [name for name in DROPPED if "*" not in name])
@pytest.mark.parametrize("value", [False, "stop"])
def test_a_dropped_setting_is_refused_by_its_name(minimal: Path, write: Write, name: str, value: object) -> None:
    """From a file, the command line and Python, whatever its value is, with what to do."""
    section, _, last = name.rpartition(".")
    said = f"`{name}` is not a setting any more; {DROPPED[name].fix}"
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"'
    assert _message(minimal, f"--{name}={text}") == said
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, settings={name: value})
    assert str(caught.value) == said
    assert _message(write(f"{MINIMAL}\n[{section}]\n{last} = {text}\n")) == said


def test_a_dropped_setting_of_a_source_is_refused_by_its_place(write: Write) -> None:
    filters = "filter = {path = 'rates.jsonl', unmeasured = 'keep'}"
    text = MINIMAL.replace("[data]", "").partition("train")[0]
    path = write(f"{text}\n[data]\ntrain = [{{name = 'jsonl'}}, {{name = 'jsonl', label = 'b', {filters}}}]\n")
    assert _message(path).startswith("`data.train.1.filter.unmeasured` is not a setting any more; ")


def test_fixes_of_dropped_settings_name_settings_that_exist() -> None:
    names = {name for names in last_names(RunConfig).values() for name in names}
    for name, dropped in DROPPED.items():
        assert name not in names
        assert not dropped.successor or dropped.successor in names & set(re.findall(r"`([\w.]+)`", dropped.fix))


def recorded(tmp_path: Path, text: str) -> Path:
    """Returns a run's recorded settings."""
    (tmp_path / "metrics.jsonl").touch()
    (path := tmp_path / RECORD).write_text(f"{MINIMAL}\n{text}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("[weight_sync]\npower_of_two_scales = false", "weight_sync.delta", False),
        ("[record]\njournal = 'needed'", "record.kind", "resume"),
        ("[record]\njournal = 'all'", "record.kind", "all"),
        ("[cluster]\non_generator_failure = 'drop'", "cluster.on_failure.generator", "drop"),
        ("[cluster]\nstart_timeout_s = 7.0\ncall_timeout_s = 9.0\nstall_timeout_s = 1.0", "cluster.timeout_s", 9.0),
        ("[cluster]\nrestart_window_s = 7.0", "cluster.max_restarts", 5),
        ("[trainer]\nmax_skipped_steps = 9\npeak_tflops = 3.0", "trainer.on_nonfinite", "stop"),
        ("[shaping]\noverlong_share = 0.2", "shaping.overlong_penalty", 0.0),
        ("[reward.model]\npath = 'm'\nbatch_tokens = 5", "reward.model.path", "m"),
        ("[data.filter]\npath = 'r'\nunmeasured = 'refuse'", "data.filter.path", "r"),
    ],
)
def test_a_record_may_have_dropped_settings(tmp_path: Path, text: str, name: str, value: object) -> None:
    path = recorded(tmp_path, text)
    for run in (load_recorded(path), load_config(path), load_config(tables(path), recorded=True)):
        assert dict(flat_settings(run.model_dump()))[name] == value
    assert "is not a setting any more" in _message(path, "--weight_sync.power_of_two_scales=false")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[weight_sync]\npower_of_two_scales = true", "weight_sync.power_of_two_scales = True"),
        ("[shaping]\noverlong_share = 0.5", "shaping.overlong_share = 0.5"),
        ("[data.filter]\npath = 'r'\nunmeasured = 'skip'", "data.filter.unmeasured = 'skip'"),
    ],
)
def test_a_record_that_todays_code_cannot_follow_is_shown_and_not_resumed(tmp_path: Path, text: str, said: str) -> None:
    path = recorded(tmp_path, text)
    assert load_recorded(path).steps
    assert f"`{said}`, which llamarl no longer has; start a new run" in _message(path)


def test_settings_in_the_header_of_an_older_journal_are_those_of_today() -> None:
    entry = {"name": "jsonl", "filter": {"path": "r", "min": 0.1}}
    header = {
        "seed": 0,
        "data": "digest",
        "data.template": "auto",
        "reward.weights": [1.0],
        "trainer.loss.name": "aipo",
    }
    old = {"trainer.max_skipped_steps": 3, "shaping.overlong_share": 0.2, "data.filter.unmeasured": "refuse"}
    old["data.train"] = [entry | {"filter": entry["filter"] | {"unmeasured": "refuse"}}]
    assert translated(header | old) == header | {"data.train": [entry]}


def test_later_override_wins(minimal: Path) -> None:
    assert load_config(minimal, ["--steps=3", "--steps=4"]).steps == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--trainer.learning_rat=1"], "unknown option `trainer.learning_rat`; did you mean `learning_rate`?"),
        (["--trainr.steps=1"], "unknown option `trainr`; did you mean `trainer`?"),
        (["--name", "7"], "`name = 7`: input should be a valid string; put quotes around it"),
        (["--steps=many"], "`steps = 'many'`: input should be a valid integer"),
        (["--steps"], "`--steps` has no value; write --steps VALUE"),
        (["steps=3"], "`steps=3` is not an override; write --section.key value"),
        (["--"], "`--` is not an override"),
        (["--seed.x=1"], "`--seed.x`: `seed` is a value, not a section"),
        (["--reward.parts=[]", "--reward.parts.0=math"], "`--reward.parts.0`: the list has no entry '0'; it has 0"),
    ],
)
def test_mistake_in_an_override_is_named(write: Write, overrides: list[str], message: str) -> None:
    assert message in _message(write("seed = 1\n" + MINIMAL), *overrides)


def test_warm_start_is_relative_to_its_file(write: Write) -> None:
    path = write(MINIMAL.replace('path = "model"', 'path = "model"\nwarm_start = "base_sft.toml"'))
    assert load_config(path).model.warm_start == str(path.parent.resolve() / "base_sft.toml")


def test_paths_begin_at_home(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file, on the command line and from Python; no other text does."""
    monkeypatch.setenv("HOME", "/home/me")
    file = write(
        'output = "~/runs"\nname = "x"\nmodel = {path = "~/m"}\n'
        'data.train = [{name = "file", path = ["~/a.jsonl", "b"]}]\nrollout.stop_strings = ["~/"]'
    )
    config = load_config(file, ["--checkpoint.copy_to", "~", "--reward.model.path=~/judge"])
    assert (config.output, config.model.path) == ("/home/me/runs", "/home/me/m")
    source = build(config.data.sources[0].source, "llamarl.data.sources", "data.train")
    assert source.path == ("/home/me/a.jsonl", "b")
    assert config.checkpoint.copy_to == "/home/me" and config.reward.model.path == "/home/me/judge"
    assert config.rollout.stop_strings == ["~/"]
    settings = {"model": {"path": Path("~/m")}, "critic.path": Path("~/c")}
    config = load_config(file, settings=settings | {"data.filter": {"path": "~/rates"}})
    assert (config.model.path, config.critic.path) == ("/home/me/m", "/home/me/c")
    assert config.data.filter is not None and config.data.filter.path == "/home/me/rates"
    assert load_sft_config(write('output = "~/base"\nsource = "running_total"')).output == "/home/me/base"
    assert (
        load_config(
            write('model = {path = "m", warm_start = "~/sft.toml"}\ndata.train = "running_total"')
        ).model.warm_start
        == "/home/me/sft.toml"
    )


def test_what_is_on_record_names_the_same_file_in_another_home(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every section: no path on record begins with `~`; other texts stay as they are."""
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(
        write(
            'model.path = "~/m"\ndata.eval = {name = "jsonl", path = "~/e.jsonl", id = "~/"}\n'
            'data.train = [{name = "file", path = ["~/a.jsonl", "b"], '
            'reward = {name = "function", file = "~/f"}}]\n'
            'reward.parts = [{name = "regex_format", pattern = "~/x"}]'
        ),
        ["--rollout.environment", "{name = 'package:World', path = '~/w'}"],
    )
    monkeypatch.setenv("HOME", "/home/another")
    again = load_config(write(dump_toml(config)))
    assert again == config
    assert again.data.sources[0].source.options == {"path": ["/home/me/a.jsonl", "b"]}
    assert again.data.sources[0].reward.parts[0].options["file"] == "/home/me/f"
    assert again.data.eval.options == {"path": "/home/me/e.jsonl", "id": "~/"}
    assert again.rollout.environment.options == {"path": "/home/me/w"}
    assert again.reward.parts[0].options == {"pattern": "~/x"}


def test_nothing_changes_after_validation(minimal: Path) -> None:
    config = load_config(minimal)
    for section, name in ((config, "steps"), (config.trainer, "learning_rate"), (config.trainer.loss, "name")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 3)


def test_sft_config(write: Write) -> None:
    path = write("output = 'base'\nsource = {name = 'running_total', error_rate = 0.5}")
    config = load_sft_config(path, ["--shape.hidden_size=64"])
    assert (config.shape.hidden_size, config.source.options) == (64, {"error_rate": 0.5})
    with pytest.raises(ConfigError, match=r"unknown option `shape\.hidden_sise`; did you mean `hidden_size`"):
        load_sft_config(path, ["--shape.hidden_sise=64"])


def test_a_row_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    """Such as of a file of another kind."""
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 26)  # takes no room on the disk
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: is too long: a row may have 1,048,576 bytes"):
        next(config.read_rows(path, "shorten it"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.parametrize(
    "option",
    ["trainer.passes", "eval.samples", "trainer.threads", "generator.threads", "critic.threads", "reference.threads"],
)
def test_what_would_never_end_is_refused(option: str) -> None:
    tables = {"model": {"path": "m"}, "data": {"train": "jsonl"}}
    with pytest.raises(ConfigError, match=option.replace(".", r"\.") + " = 1000000"):
        load_config(tables, [f"--{option}", "1000000"])
    sets = [{"name": "jsonl", "path": "x", "label": "held", "samples": 1_000_000}]
    with pytest.raises(ConfigError, match="samples = 1000000"):
        load_config(tables | {"data": {"train": "jsonl", "eval": sets}})
