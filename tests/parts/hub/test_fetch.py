"""The Hub's own client against a server on the loopback: what is fetched, what each failure says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.config.hub import HubName, cache_folder, folder_of, hub_name, nothing_fetched
from llamarl.parts.hub import client
from llamarl.parts.hub import process as asking
from llamarl.parts.hub.cache import Repository
from llamarl.parts.hub.fetch import cached, fetched, listing, model_files, small_files
from tests.end_to_end.test_disk import disk, fill  # noqa: F401, a fixture
from tests.nightly import nightly
from tests.parts.hub.server import HubServer

NAME = HubName("tiny/model")
LARGE = os.urandom(3 << 20)
FILES = {
    "config.json": b"{}", "tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}", "model.safetensors": LARGE,
    "onnx/model.safetensors": b"other", "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"# tiny",
}  # fmt: skip
TAKEN = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
COMMAND = [
    sys.executable, "-c",
    "from llamarl.parts.hub.fetch import HubName, fetched; print(fetched(HubName('tiny/model')).folder)",
]  # fmt: skip


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts, including those of the Hub's client, are a fiftieth."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda pause_s: sleep(pause_s / 50))


@pytest.fixture
def model(hub: HubServer) -> str:
    """The commit of `tiny/model`."""
    return hub.add("tiny/model", FILES)


def refusal(name: str = "tiny/model", **how: object) -> str:
    with pytest.raises(ConfigError) as error:
        fetched(HubName(*name.partition("@")[::2]), **how)
    return str(error.value)


def left() -> list[Path]:
    return list(cache_folder().rglob("*.incomplete"))


def test_the_files_of_a_model_and_no_others(hub: HubServer, model: str) -> None:
    found = fetched(NAME)
    assert found.name == NAME.at(model) and found.commit == model and not found.note
    assert found.files == {name: len(FILES[name]) for name in TAKEN}
    here = {path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*") if path.is_file()}
    assert here == TAKEN and all((found.folder / name).read_bytes() == FILES[name] for name in TAKEN)
    assert folder_of(f"tiny/model@{model}") == found.folder and not left()


def test_a_second_time_costs_one_request_and_a_commit_none(hub: HubServer, model: str) -> None:
    first = fetched(NAME)
    hub.requests.clear()
    assert fetched(NAME) == first
    assert [path for _, path in hub.requests] == ["/api/models/tiny/model"]
    hub.requests.clear()
    assert fetched(NAME.at(model)) == first and listing(NAME.at(model))[0] == model and not hub.requests


def test_a_branch_that_moved_is_followed_and_a_commit_stays(hub: HubServer, model: str) -> None:
    old = fetched(NAME)
    new = hub.add("tiny/model", FILES | {"config.json": b'{"new": 1}'})
    hub.requests.clear()
    found = fetched(NAME)
    assert found.commit == new and (found.folder / "config.json").read_bytes() == b'{"new": 1}'
    assert hub.asked("/lfs/") == 0, "the same file is not fetched again"
    assert fetched(NAME.at(model)) == old and (old.folder / "config.json").read_bytes() == b"{}"


def test_branches_and_tags(hub: HubServer, model: str) -> None:
    tagged = hub.add("tiny/model", FILES | {"config.json": b'{"v": 2}'}, revision="v2/final")
    assert fetched(NAME.at("v2/final")).commit == tagged != fetched(NAME).commit
    with nothing_fetched("nobody is asked"):
        assert fetched(NAME.at("v2/final")).commit == tagged and fetched(NAME).commit == model


def test_without_weights(hub: HubServer, model: str) -> None:
    assert set(fetched(NAME, choose=small_files).files) == TAKEN - {"model.safetensors"}
    assert hub.asked("/lfs/") == 0
    assert cached(NAME) is None and cached(NAME, choose=small_files)


def test_a_data_set_is_listed_and_its_files_are_chosen(hub: HubServer) -> None:
    commit = hub.add(
        "a/rows", {"README.md": b"#", "main/train-0.parquet": LARGE, "main/test-0.parquet": b"t"}, "dataset"
    )
    assert listing(HubName("a/rows"), "dataset") == (
        commit, {"README.md": 1, "main/test-0.parquet": 1, "main/train-0.parquet": len(LARGE)},
    )  # fmt: skip
    found = fetched(HubName("a/rows"), "dataset", lambda files: [one for one in files if "test" in one])
    assert (found.folder / "main/test-0.parquet").read_bytes() == b"t" and len(found.files) == 1
    assert "no such data set" in refusal("a/rows2", kind="dataset")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md"}, "no config.json"),
        ({"config.json", "pytorch_model.bin"}, "(pytorch_model.bin)"),
        ({"config.json", "model.gguf", "x/model.safetensors"}, "neither model.safetensors nor"),
        ({"config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"}, "1 shards of 2"),
    ],
)
def test_what_is_no_whole_model(files: set[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_files(dict.fromkeys(files, 1))
    assert message in str(error.value)


def test_shards_come_with_their_index() -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = dict.fromkeys(["config.json", "model.safetensors.index.json", *shards, f"x/{shards[0]}", "model-1.bin"], 1)
    assert model_files(files) == ["config.json", "model.safetensors.index.json", *shards]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/Qwen2.5-0.5B") == HubName("Qwen/Qwen2.5-0.5B")
    assert hub_name("a/b@refs/pr/1") == HubName("a/b", "refs/pr/1") and str(hub_name("a/b@v1")) == "a/b@v1"
    for path in (
        "/a/b",
        "./a/b",
        "a",
        "a/b/c",
        "~/b",
        "../b",
        "a/b@../../x",
        "a--b/c",
        "a/b@",
        "a/b c",
        "a/-b",
        "runs/x/",
    ):
        assert hub_name(path) is None, path
    (tmp_path / "a/b").mkdir(parents=True)
    assert hub_name("a/b") is None and folder_of("a/b") == Path("a/b"), "an existing folder wins"
    assert hub_name("a/c") is None and folder_of("a/c") == Path("a/c"), "it begins with a local folder"
    assert hub_name("a/c@main") == HubName("a/c", "main") and hub_name("runs/c") is None
    with pytest.raises(ConfigError, match="no folder 'c/d', and nothing was fetched from the Hub by that name"):
        folder_of("c/d")
    with pytest.raises(ConfigError, match=f"hf download a/c --revision {'0' * 40}, or point HF_HOME"):
        folder_of(f"a/c@{'0' * 40}")


@pytest.mark.parametrize(
    ("token", "message"),
    [("", "anybody without a token"), ("hf_good", "your token")],
)
def test_a_gated_model(hub: HubServer, model: str, monkeypatch: pytest.MonkeyPatch, token: str, message: str) -> None:
    hub.repos["model", "tiny/model"].gated = True
    monkeypatch.setenv("HF_TOKEN", token)
    said = refusal()
    assert message in said and f"{hub.endpoint}/tiny/model" in said and "HF_TOKEN" in said
    hub.members.add("tester")
    assert not token or fetched(NAME).commit == model


def test_unknown_names_and_those_that_are_near(hub: HubServer, model: str) -> None:
    hub.add("other/gadget-9B", FILES)
    said = refusal("other/gadget-9b-it")
    assert "no such folder" in said and "no such model" in said and "`other/gadget-9B`" not in said
    assert "`other/gadget-9B`" in refusal("mother/gadget-9B")
    fetched(NAME)
    assert "`tiny/model`" in refusal("tiny/modle"), "those of the cache are known without a question"
    hub.repos["model", "tiny/model"].private = True
    assert "HF_TOKEN" in refusal("tiny/models")


def test_an_unknown_revision_is_not_answered_by_the_cache(hub: HubServer, model: str) -> None:
    fetched(NAME)
    said = refusal("tiny/model@v3")
    assert "no revision 'v3'" in said and f"{hub.endpoint}/tiny/model/commits" in said
    assert "no revision" in refusal(f"tiny/model@{'1' * 40}")
    hub.add("tiny/model", FILES, revision="v2")
    fetched(NAME.at("v2"))
    del hub.repos["model", "tiny/model"].refs["v2"]
    assert "no revision 'v2'" in refusal("tiny/model@v2"), "somebody has deleted it on purpose"


def test_a_bad_token(hub: HubServer, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    said = refusal()
    assert "HF_TOKEN" in said and f"{hub.endpoint}/settings/tokens" in said


def test_a_forbidden_model(hub: HubServer, model: str) -> None:
    hub.fail("/api/models/tiny/model", status=401, times=1)
    said = refusal()
    assert "HF_TOKEN" in said and f"{hub.endpoint}/settings" in said
    hub.fail("/api/models/tiny/model", status=403)
    assert "does not allow this for anybody without a token" in refusal()


def test_a_closed_model(hub: HubServer, model: str) -> None:
    hub.fail("/api/models/tiny/model", status=403, headers={"X-Error-Message": "Access to this resource is disabled."})
    said = refusal()
    assert "closed this model" in said and f"{hub.endpoint}/tiny/model" in said


@pytest.mark.usefixtures("hasty")
def test_a_server_that_fails_is_asked_three_times(
    hub: HubServer, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = hub.fail("/api/models/tiny/model", status=502)
    assert "502" in refusal() and fault.seen == 3
    said = capfd.readouterr().err
    assert "tiny/model: " in said and "502" in said and " 1 s\n" in said
    hub.faults[:] = []
    hub.fail("/api/models/tiny/model", status=500, times=2)
    assert fetched(NAME).commit == model


@pytest.mark.usefixtures("hasty")
def test_a_server_that_fails_in_the_middle(hub: HubServer, model: str) -> None:
    fault = hub.fail("/resolve/", method="HEAD", status=500)
    assert "500" in refusal()
    fault.times = 0
    fault = hub.fail("/lfs/", status=503, times=2)
    assert fetched(NAME).commit == model and fault.seen == 2


@pytest.mark.usefixtures("hasty")
def test_a_rate_limit_is_waited_for_and_a_long_one_is_said(hub: HubServer, model: str) -> None:
    hub.fail("/api/models/tiny/model", status=429, headers={"Retry-After": "7"}, times=2)
    assert fetched(NAME).commit == model
    fault = hub.fail("/api/models/tiny/model", status=429, headers={"Retry-After": "3000"})
    said = refusal("tiny/model@v2")
    assert "429" in said and "3000 s" in said and "HF_TOKEN" in said
    assert fault.seen == 1


def test_nobody_answers(hub: HubServer, model: str, monkeypatch: pytest.MonkeyPatch, hasty: None) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said = refusal()
    assert "http://127.0.0.1:9 " in said and "ConnectError" in said
    assert str(cache_folder()) in said and "HF_HUB_OFFLINE=1" in said


@pytest.mark.parametrize(
    ("status", "cause"), [(401, "requires a login"), (403, "does not allow"), (500, "answered 500")]
)
@pytest.mark.usefixtures("hasty")
def test_what_is_cached_serves_where_the_hub_refuses_and_that_is_said(
    hub: HubServer, model: str, status: int, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    fetched(NAME)
    hub.add("tiny/model", {"config.json": b"new"})
    hub.fail("/api/models/tiny/model", status=status)
    found = fetched(NAME)
    assert found.commit == model and cause in found.note and "cache" in found.note
    capfd.readouterr()
    assert listing(NAME)[0] == model and f"tiny/model: {found.note}\n" in capfd.readouterr().err


def test_offline(hub: HubServer, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refusal("tiny/model@v1")
    assert "HF_HUB_OFFLINE" in said and f"({cache_folder()}) has nothing of it" in said
    assert said.endswith("hf download tiny/model --revision v1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = fetched(NAME)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert fetched(NAME) == found and not hub.requests
    (found.folder / "tokenizer.json").unlink()
    assert "1 of its files, first tokenizer.json" in refusal()
    assert refusal("a/rows", kind="dataset").endswith("hf download a/rows --repo-type dataset")


@nightly("another process; by day what is cached serves where the Hub refuses")
def test_what_another_program_fetched_serves_without_a_listing(
    hub: HubServer, model: str, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetched(NAME)
    tree = Repository("tiny/model").path / "trees" / f"{model}.json"
    tree.unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert fetched(NAME) == fetched(NAME.at(model)) == found and not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    (found.folder / "tokenizer_config.json").unlink()
    assert fetched(NAME.at(model)) == found and hub.asked("/lfs/") == 0, "another program may leave some out"
    assert (found.folder / "tokenizer_config.json").is_file()
    hub.requests.clear()
    assert fetched(NAME.at(model)) == found and not hub.requests, "now there is a listing"
    tree.unlink()
    hub.fail("/api/models/tiny/model", status=500)
    assert fetched(NAME.at(model)).files == found.files, "where nobody answers"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found.folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal()


def test_a_flipped_byte_is_fetched_again_once(hub: HubServer, model: str, capfd: pytest.CaptureFixture[str]) -> None:
    hub.fail("/lfs/", flip_at=1 << 20, times=1)
    found = fetched(NAME)
    assert (found.folder / "model.safetensors").read_bytes() == LARGE and hub.asked("/lfs/") == 2
    assert "model.safetensors came with the digest" in capfd.readouterr().err
    hub.add("tiny/model", FILES | {"tokenizer.json": b'{"b": 2}'})
    hub.fail("tokenizer.json", flip_at=1)
    assert "tokenizer.json came twice with the digest" in refusal()
    assert cached(NAME) is None


def test_a_cached_file_that_was_cut_is_fetched_again(
    hub: HubServer, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = fetched(NAME)
    blob = (found.folder / "model.safetensors").resolve()
    blob.chmod(0o644)
    os.truncate(blob, 1000)
    assert cached(NAME.at(model)) is None
    assert fetched(NAME.at(model)) == found and blob.read_bytes() == LARGE
    assert " came with " not in capfd.readouterr().err, "it was not the Hub who sent it so"


def test_a_cached_file_that_was_deleted_is_fetched_again(hub: HubServer, model: str) -> None:
    found = fetched(NAME)
    (found.folder / "model.safetensors").resolve().unlink()
    assert fetched(NAME.at(model)) == found and (found.folder / "model.safetensors").read_bytes() == LARGE


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: HubServer, model: str, hasty: None) -> None:
    hub.fail("/lfs/", cut_at=1 << 20, times=1)
    assert (fetched(NAME).folder / "model.safetensors").read_bytes() == LARGE
    assert hub.asked("/lfs/") == 2


def test_a_connection_that_is_cut_for_good(hub: HubServer, model: str, hasty: None) -> None:
    hub.fail("/lfs/", cut_at=0)
    said = refusal()
    assert f"connection to {hub.endpoint} broke" in said and "three times" in said and not left()
    hub.faults[:] = []
    hub.requests.clear()
    assert fetched(NAME).commit == model
    assert hub.asked("/lfs/") == 1 and hub.asked("resolve") == 0, "the other files are here already"


@pytest.mark.usefixtures("hasty")
def test_what_the_storage_of_pieces_raises(hub: HubServer, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no errors but RuntimeErrors; this server has no such storage, so one is raised in its place."""

    def get(*_: object, **__: object) -> None:
        raise RuntimeError("data processing: reset by peer")

    monkeypatch.setattr(client, "hf_hub_download", get)
    said = refusal()
    assert "three times (RuntimeError: data processing: reset by peer)" in said


def test_a_full_disk(hub: HubServer, model: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("HF_HOME", str(disk))
    said = refusal()
    assert f"no room in {disk}/hub" in said and "HF_HOME" in said
    assert hub.asked("/lfs/") == 1, "the same would happen again"


def test_a_cache_that_cannot_be_written(hub: HubServer, model: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    assert f"the cache {tmp_path}/file/hub " in refusal()


def test_a_cache_that_is_read_only_serves(hub: HubServer, disk: Path, monkeypatch) -> None:  # noqa: F811
    commit = hub.add("tiny/model", FILES | {"model.safetensors": b"small"})
    monkeypatch.setenv("HF_HOME", str(disk))
    found = fetched(NAME)
    tree = Repository("tiny/model").path / "trees" / f"{commit}.json"
    tree.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert fetched(NAME) == found and not tree.exists()


@nightly("processes; by day fetches break and go on, and what is cached serves")
def test_nobody_but_the_client_s_process_imports_it() -> None:
    code = "import sys, llamarl.cli.train, llamarl.run.train; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240.0).returncode == 0


@pytest.mark.usefixtures("own_process")
def test_a_client_that_dies_is_no_endless_wait(hub: HubServer, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "COMMAND", ("-c", "import sys; sys.stdin.readline(); sys.exit(7)"))
    assert "exit code 7" in refusal()
    monkeypatch.setattr(asking, "COMMAND", ("-c", "import sys; sys.exit(8)"))
    assert "exit code 8" in refusal(), "with the order unread"
    monkeypatch.setattr(asking, "COMMAND", ("-c", "import time; time.sleep(100)"))
    monkeypatch.setattr(asking, "LIST_S", 0.5)
    assert "has sent 0 bytes" in refusal()


@pytest.fixture
def slow(hub: HubServer, model: str) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that fetch a model whose weights take five minutes."""
    hub.fail("/lfs/", bytes_per_s=10_000)
    started = list[subprocess.Popen[str]]()

    def start() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        until(lambda: (cached(NAME, choose=small_files) and left()) or started[-1].poll() is not None)
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 240.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def clients() -> list[int]:
    """Processes that talk to this test's Hub."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            is_ours = os.environ["HF_HOME"].encode() in path.with_name("environ").read_bytes()
        except OSError:
            continue
        if b"llamarl.parts.hub.client" in words and is_ours:
            found.append(int(path.parent.name))
    return found


@nightly("processes; by day fetches break and go on, and what is cached serves")
def test_ctrl_c_ends_it_at_once_and_the_next_start_goes_on(hub: HubServer, model: str, slow: Callable) -> None:
    process = slow()
    start_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(240.0)
    assert time.monotonic() - start_s < 60.0, "not when the file in flight is whole, after five minutes"
    until(lambda: not clients())
    hub.faults[:] = []
    hub.requests.clear()
    assert fetched(NAME).commit == model
    assert hub.asked("config.json") == 0, "what was whole is not fetched again"


@nightly("processes that are killed; by day a fetch that breaks goes on")
def test_who_is_killed_leaves_no_process_and_what_it_left_is_swept(hub: HubServer, model: str, slow: Callable) -> None:
    process = slow()
    until(left)
    process.kill()
    until(lambda: not clients())
    (old,) = left()
    hub.faults[:] = []
    os.utime(old, (0, 0))
    assert (fetched(NAME).folder / "model.safetensors").read_bytes() == LARGE
    assert not left()


@nightly("processes that are killed; by day a fetch that breaks goes on")
def test_what_another_process_fetches_is_not_swept_and_fetched_once(hub: HubServer, model: str, slow: Callable) -> None:
    process = slow()
    until(left)
    (other,) = left()
    os.utime(other, (0, 0))  # as if it stood still: its lock is held
    found = list[object]()
    second = threading.Thread(target=lambda: found.append(fetched(NAME)))
    second.start()
    until(lambda: hub.asked("model.safetensors", "HEAD") == 2)
    assert left() == [other]
    hub.faults[0].bytes_per_s = None
    second.join(240.0)
    assert process.communicate(timeout=240.0)[0].strip() == str(found[0].folder)  # pyrefly: ignore[missing-attribute]
    assert hub.asked("/lfs/") == 1


def test_progress_is_said_in_lines_where_there_is_no_terminal(
    hub: HubServer, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    total = sum(len(FILES[name]) for name in TAKEN)
    fetched(NAME)
    assert f"tiny/model@{model[:12]}: {total / 1e6:.1f} of {total / 1e6:.1f} MB\n" in capfd.readouterr().err


def test_a_damaged_listing_is_asked_for_again(hub: HubServer, model: str) -> None:
    fetched(NAME)
    tree = Repository("tiny/model").path / "trees" / f"{model}.json"
    for text in ("", "[]", '{"format_version": 2, "files": {}}', '{"format_version": 1, "files": {"a": 3}}'):
        tree.write_text(text)
        hub.requests.clear()
        assert set(fetched(NAME).files) == TAKEN and hub.asked("/tree/") == 1
    assert json.loads(tree.read_text())["files"]["model.safetensors"]["lfs_size"] == len(LARGE)


def test_the_client_s_own_commands_take_what_was_fetched(hub: HubServer, model: str, monkeypatch) -> None:
    found = fetched(NAME)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = f"from huggingface_hub import snapshot_download as d; print(d('tiny/model', allow_patterns={sorted(TAKEN)}))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240.0)
    assert told.stdout.strip() == str(found.folder), told.stderr
