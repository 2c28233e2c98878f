"""Which names of the Hub a command asks for, which commits it takes, and what stays on record of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import llamarl
from llamarl.config import RunConfig, load_config
from llamarl.parts.hub.card import model_card
from llamarl.run.folder import RunFolder, prepare_run_folder
from llamarl.run.hub_pins import commits_of, record_of, resolved
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml
from tests.nightly import nightly
from tests.parts.hub.server import HubServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("names") / "model")


@pytest.fixture
def given(tmp_path: Path, model: Path) -> dict[str, Any]:
    """Settings of a run over a local model, below `tmp_path`."""
    reward = {"parts": ["exact"]}
    return {"name": "named", "steps": 1, "model": {"path": str(model)}, "output": str(tmp_path), "reward": reward}


def add_sums(hub: HubServer, answer: int, **where: str) -> str:
    row = json.dumps({"question": "40 and 2?", "answer": str(answer)}).encode()
    return hub.add("me/sums", {"train.jsonl": row}, kind="dataset", **where)


def begun(config: RunConfig, *, resume: bool = False) -> RunFolder:
    """Its folder, as a start leaves it."""
    run = Path(config.output, config.name) if resume else None
    with prepare_run_folder(config, resume=resume, overwrite=False, pinned=resolved(config, run=run)) as folder:
        return folder


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"path": "me/sums@v1"}, "me/sums@v1"), ({"path": "me/sums", "revision": "v1"}, "me/sums@v1"),
        ({"path": "me/sums@main", "revision": "v1"}, "me/sums@v1"), ({"path": "me/sums"}, "me/sums"),
    ],
)  # fmt: skip
def test_data_keep_the_commit_of_a_name_however_it_is_written(
    hub: HubServer, given: dict[str, Any], train: dict[str, str], key: str
) -> None:
    main, v1 = add_sums(hub, 42), add_sums(hub, 43, revision="v1")
    config = load_config(given | {"data": {"train": {"name": "hub"} | train}})
    folder, commit = begun(config), v1 if "@" in key else main
    assert commits_of(folder.path) == {f"datasets/{key}": commit}
    add_sums(hub, 44), add_sums(hub, 45, revision="v1")
    pinned = resolved(config, run=folder.path)
    assert pinned.data.train.options["revision"] == commit, "it goes on with the commit that it began with"
    assert resolved(config, data=False) == config
    assert record_of(config, pinned)[f"datasets/{key}"] == {"commit": commit}


def test_each_source_of_a_mixture_keeps_its_commit(hub: HubServer, given: dict[str, Any]) -> None:
    commit = add_sums(hub, 42)
    other = hub.add("me/more", {"train.jsonl": b'{"question": "q", "answer": "1"}'}, kind="dataset")
    train = ["running_total", {"name": "hub", "path": "me/sums"}, {"name": "hub", "path": "me/more", "weight": 2}]
    config = load_config(given | {"data": {"train": train}})
    folder = begun(config)
    assert commits_of(folder.path) == {"datasets/me/sums": commit, "datasets/me/more": other}
    add_sums(hub, 44)
    pinned = resolved(config, run=folder.path)
    assert [one.source.options.get("revision") for one in pinned.data.sources] == [None, commit, other]
    assert [one.label for one in pinned.data.sources] == ["running_total", "sums", "more"]


def test_a_name_that_comes_at_resume_is_on_record_from_then_on(hub: HubServer, given: dict[str, Any]) -> None:
    data: dict[str, Any] = {"train": "running_total"}
    folder = begun(load_config(given | {"data": data}))
    before = json.loads(folder.weights.read_text())
    commit = add_sums(hub, 42)
    later = load_config(given | {"data": data | {"eval": {"name": "hub", "path": "me/sums"}}})
    begun(later, resume=True)
    after = before | {"datasets/me/sums": {"commit": commit}}
    assert json.loads(folder.weights.read_text()) == after
    add_sums(hub, 43)
    begun(later, resume=True)
    begun(load_config(given | {"data": data}), resume=True)
    assert json.loads(folder.weights.read_text()) == after, "what is on record stays"


def test_an_evaluation_asks_for_what_it_reads_and_takes_the_run_s_commits(
    hub: HubServer, given: dict[str, Any], model: Path
) -> None:
    add_sums(hub, 42), hub.add("me/judge", {"config.json": b"{}", "model.safetensors": b"0"})
    hub.add("me/train", {"train.jsonl": b'{"question": "q", "answer": "1"}'}, kind="dataset")
    data = {name: {"name": "hub", "path": path} for name, path in (("train", "me/train"), ("eval", "me/sums"))}
    folder = begun(load_config(given | {"data": data, "reward": given["reward"] | {"model": {"path": "me/judge"}}}))
    add_sums(hub, 43)
    del hub.repos["dataset", "me/train"], hub.repos["model", "me/judge"]
    folder.weights.write_text(json.dumps({key: one for key, one in _record(folder).items() if "sums" in key}))
    hub.requests.clear()
    short = {"rollout": {"max_new_tokens": 2}}
    found = llamarl.evaluate(model, config=str(folder.config), **short)
    assert [row["answer"] for row in found.responses] == ["42"], "the run's own, not today's"
    output = folder.path.parent / "answers.jsonl"
    words = ("--config", folder.config, "--rollout.max_new_tokens", 2, "--output", output)
    done = llamarl_here("eval", model, *words)
    assert done.returncode == 0 and json.loads(output.read_text())["answer"] == "42", done.stderr
    assert not hub.asked("me/train") and not hub.asked("me/judge")
    found = llamarl.evaluate(model, config=load_config(folder.config), **short)
    assert [row["answer"] for row in found.responses] == ["43"], "settings alone are of no run"


def test_every_set_of_an_evaluation_keeps_its_commit(hub: HubServer, given: dict[str, Any], model: Path) -> None:
    add_sums(hub, 42)
    other = hub.add("me/words", {"train.jsonl": b'{"question": "q", "answer": "1"}'}, kind="dataset")
    sets = [{"label": "sums", "name": "hub", "path": "me/sums"}, {"name": "hub", "path": "me/words@main"}]
    config = load_config(
        given | {"data": {"train": "running_total", "eval": [*sets, {"name": "running_total", "count": 2}]}}
    )
    folder = begun(config)
    add_sums(hub, 43)
    pinned = resolved(config, run=folder.path)
    assert commits_of(folder.path)["datasets/me/words@main"] == other
    assert [one.source.options.get("revision") for one in pinned.data.eval_sets] == [
        commits_of(folder.path)["datasets/me/sums"], other, None,
    ]  # fmt: skip
    found = llamarl.evaluate(model, config=str(folder.config), rollout={"max_new_tokens": 2})
    assert isinstance(found, dict) and list(found) == ["sums", "words", "running_total"]
    assert [row["answer"] for row in found["sums"].responses] == ["42"], "the run's own, not today's"


def _record(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.weights.read_text())


def test_a_card_names_no_folder_as_if_the_hub_had_it(
    given: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/tiny").symlink_to(model)
    config = load_config(given | {"model": {"path": "models/tiny"}, "data": {"train": "running_total"}})
    folder = begun(config)
    os.chdir(tmp_path.parent)
    card = model_card(folder.path, config, 1, "me/tiny", adapters=False)
    assert "base_model" not in yaml.safe_load(card.split("---")[1]) and "| base model | a folder |" in card


DATED = "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.content }}\n{% endfor %}"


@nightly("runs of their own; by day names keep their commits")
def test_a_date_goes_with_the_chat_template_that_writes_it(tmp_path: Path) -> None:
    dated, plain = make_model(tmp_path / "dated"), make_model(tmp_path / "plain")
    (dated / "chat_template.jinja").write_text(DATED)
    (plain / "chat_template.jinja").write_text(DATED.partition("\n")[2])
    toml = write_toml(tmp_path, dated)
    words = ("train", toml, "--output", tmp_path, "--cluster.kind", "inline", "--steps", 1)
    done = llamarl_here(*words)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "tiny/config.toml"
    day = load_config(config).data.date
    config.write_text(config.read_text().replace(f'"{day}"', '"2020-01-02"'))
    assert "02 Jan 2020" in llamarl_here(*words, "--dry-run", "--resume").stdout, "the prompts with which it goes on"
    assert "02 Jan 2020" not in llamarl_here(*words, "--dry-run", "--name", "other").stdout
    short = ("--config", config, "--eval.max_prompts", 1, "--rollout.max_new_tokens", 1)
    same = llamarl_here("eval", dated, *short)
    assert same.returncode == 0 and "02 Jan 2020" in same.stdout, same.stdout + same.stderr
    for one in (("eval", plain, *short), ("eval", dated, *short, "--data.template", "{question}\n")):
        found = llamarl_here(*one)
        assert found.returncode == 0 and "02 Jan 2020" not in found.stdout, found.stderr
    refused = llamarl_here("eval", plain, *short, "--data.date", "2020-01-02")
    assert refused.returncode == 2 and "does not use a date; leave it out" in refused.stderr
