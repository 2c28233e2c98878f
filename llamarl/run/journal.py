"""Opens the journal of a run, with the settings that its records depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamarl.config import RunConfig
from llamarl.config.load import flat_settings
from llamarl.controller.admission import Problems, data_fingerprint
from llamarl.journal.reader import GIVEN, JournalReader
from llamarl.journal.writer import Journal
from llamarl.run.folder import RunFolder
from llamarl.run.python_inputs import by_what_it_does
from llamarl.run.trust import digests_of

_SECTIONS = ("model", "data", "rollout", "trainer", "reference", "critic", "reward", "shaping")
_NO_MATTER = {
    "threads", "device", "parallelism", "microbatch_tokens", "activation_checkpointing", "compile",
    "segment_tokens", "moments_on", "warm_start", "eval",
}  # fmt: skip
"""Settings that change only where or how fast something is computed, or nothing that is recorded."""
_LEAST: dict[str, Any] = {"model": {"path": ""}, "data": {"train": "jsonl"}}
"""All settings without a default."""


def open_journal(config: RunConfig, problems: Problems, folder: RunFolder, warn: Callable[[str], None]) -> Journal:
    """Creates the journal of a run. Nothing is read or written yet. Raises OSError if it cannot be written."""
    settings, usual = _of_record(config), _of_record(RunConfig.model_validate(_LEAST))
    settings |= {"data": data_fingerprint(problems.train), GIVEN: digests_of(config)}
    keep = config.checkpoint.keep
    reader = JournalReader(
        folder.path,
        problems.train,
        settings,
        defaults={name: usual[name] for name in settings if name in usual},
        saved=folder.saved_steps()[-keep:],
    )
    return Journal(reader, warn, keep=keep, keeps=config.record.kind)


def _of_record(config: RunConfig) -> dict[str, Any]:
    """Returns recorded settings by dotted names, without empty tables."""
    found = flat_settings(config.model_dump(mode="json", include={*_SECTIONS, "seed"}))
    return {
        name: by_what_it_does(value) for name, value in found if value != {} and _NO_MATTER.isdisjoint(name.split("."))
    }
