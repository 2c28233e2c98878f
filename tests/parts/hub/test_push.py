"""`llamarl export --push`: the Hub's own client puts a trained model there, with its card."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.end_to_end.tiny import llamarl_here, make_model, write_toml
from tests.nightly import also, nightly
from tests.parts.hub.server import HubServer

SHORT = ("--cluster.kind", "inline", "--steps", 2, "--checkpoint.every_steps", 2)
NAME = "tester/trained"
KEY = ("model", NAME)


@pytest.fixture
def run(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run over `tiny/model`, by who may push."""
    folder = make_model(tmp_path / "model")
    hub.add("tiny/model", {path.name: path.read_bytes() for path in folder.iterdir()})
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    trained = llamarl_here("train", write_toml(tmp_path, Path("tiny/model")), "--output", tmp_path, *SHORT)
    assert trained.returncode == 0, trained.stderr
    return tmp_path / "tiny"


def files(hub: HubServer, key: tuple[str, str] = KEY) -> dict[str, bytes]:
    return hub.repos[key].commits[hub.repos[key].refs["main"]]


def test_a_model_goes_there_with_a_card_of_its_run(hub: HubServer, run: Path) -> None:
    found = llamarl_here("export", run, "--push", NAME)
    assert found.returncode == 0, found.stderr
    commit = hub.repos[KEY].refs["main"]
    assert f"pushed: {hub.endpoint}/{NAME} at commit {commit} (private)\n" in found.stdout
    assert hub.repos[KEY].private
    pushed, written = (
        files(hub),
        {path.name: path.read_bytes() for path in (run / "export").iterdir() if path.name != "README.md"},
    )
    assert {name: pushed[name] for name in written} == written
    assert pushed.keys() - written.keys() == {".gitattributes", "README.md"}
    card = pushed["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "tiny/model" and head["library_name"] == "transformers"
    assert head["tags"] == ["llamarl", "reinforcement-learning"]
    base = hub.repos["model", "tiny/model"].refs["main"]
    for line in (
        f"| base model | tiny/model at commit {base} |", "| data | running_total |", "| reward | exact |",
        "| steps | 2, of 2 prompts with 3 responses each |", "| accuracy at step 0 | 0.", "| accuracy at step 2 | 0.",
    ):  # fmt: skip
        assert line in card, card
    assert str(run.parent) not in card, "no path of this machine"
    generated = llamarl_here("generate", NAME, "--prompts", __file__, "--rollout.max_new_tokens", 1)
    assert generated.returncode == 0, "what was pushed can be named"


@nightly("pushes once more; by day a model goes there, and who may not hears why")
def test_a_second_push_deletes_nothing_and_leaves_a_card_of_somebody_s_own(hub: HubServer, run: Path) -> None:
    assert llamarl_here("export", run, "--push", NAME, "--public").returncode == 0
    assert not hub.repos[KEY].private
    hub.add(NAME, files(hub) | {"notes.txt": b"mine"})
    again = llamarl_here("export", run, "--push", NAME)
    assert again.returncode == 0 and again.stdout.endswith("(public)\n"), "it stays what it is"
    assert files(hub)["notes.txt"] == b"mine"
    hub.add(NAME, files(hub) | {"README.md": b"# My own"})
    last = llamarl_here("export", run, "--push", NAME)
    assert "; its README.md is somebody's own and stays)" in last.stdout and files(hub)["README.md"] == b"# My own"


@nightly("adapters once more; by day a model goes there")
def test_adapters_are_said_to_be_adapters(hub: HubServer, run: Path, tmp_path: Path) -> None:
    words = ("--trainer.lora.rank", 4, "--name", "adapters", "--output", tmp_path, *SHORT)
    assert llamarl_here("train", tmp_path / "tiny.toml", *words).returncode == 0
    pushed = llamarl_here("export", tmp_path / "adapters", "--push", NAME)
    assert pushed.returncode == 0, pushed.stderr
    found = files(hub)
    assert "adapter_model.safetensors" in found
    card = found["README.md"].decode()
    assert (
        "library_name: peft" in card and "| LoRA | rank 4, alpha 32 |" in card and "LoRA adapters, trained by" in card
    )
    config = found["adapter_config.json"].decode()
    assert '"base_model_name_or_path": "tiny/model"' in config
    assert f'"revision": "{hub.repos["model", "tiny/model"].refs["main"]}"' in config


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [
        *also(
            ("", NAME, "the Hub takes a model from those it knows; set HF_TOKEN to one of"),
            ("hf_bad", NAME, "the Hub does not know your token (HF_TOKEN)"),
        ),
        ("hf_good", "other/trained", "does not allow this for the account of your token (HF_TOKEN) (you may not"),
    ],
)
def test_who_may_not_push_hears_why(
    hub: HubServer, run: Path, monkeypatch, token: str, name: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    found = llamarl_here("export", run, "--push", name)
    assert found.returncode == 2 and f"llamarl export: --push {name}: " in found.stderr
    assert message in found.stderr and f"(it is written to {run / 'export'})" in found.stderr
    assert KEY not in hub.repos


@nightly("pushes once more; by day a model goes there, and who may not hears why")
def test_a_push_offline_and_one_that_breaks(hub: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        "HF_HUB_OFFLINE is set, so the Hub is not asked, and nothing goes there"
        in llamarl_here("export", run, "--push", NAME).stderr
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.fail("/preupload/", method="POST", status=400, headers={"X-Error-Message": "no"})
    assert "the Hub answered 400 as the model went there" in llamarl_here("export", run, "--push", NAME).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--push", "nowhere"], "--push nowhere: it is not the name of a repository; give OWNER/NAME"),
        (["--push", "a/b@v1"], "it is not the name of a repository"),
        (["--push", "a/b", "--rollouts"], "rollouts are not a model"),
        (["--public"], "--public is for --push"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], message: str) -> None:
    found = llamarl_here("export", tmp_path, *words)
    assert found.returncode == 2 and message in found.stderr
