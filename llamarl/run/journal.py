"""The journal of a run, and what its records depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llamarl.config import RunConfig
from llamarl.controller.admission import Problems, data_fingerprint
from llamarl.controller.journal import Journal
from llamarl.run.folder import RunFolder

_SECTIONS = ("model", "data", "rollout", "trainer", "reference", "critic", "reward", "shaping")
_NO_MATTER = {
    "threads", "device", "parallelism", "microbatch_tokens", "batch_tokens", "activation_checkpointing", "compile",
    "peak_tflops", "segment_tokens", "warm_start", "eval", "moments_on",
}  # fmt: skip
"""Change where and how fast something is computed, or nothing that is recorded."""


def open_journal(config: RunConfig, problems: Problems, folder: RunFolder, warn: Callable[[str], None]) -> Journal:
    """Nothing is read or written yet. Raises OSError: it cannot be written."""
    sections = config.model_dump(mode="json", include={*_SECTIONS, "seed"})
    settings = dict(_flat("", sections)) | {"data": data_fingerprint(problems.train)}
    return Journal(
        folder.path,
        warn,
        prompts=problems.train,
        settings=settings,
        keep=config.checkpoint.keep,
        saved=folder.saved_steps(),
        keeps=config.record.kind,
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key in value:
        if key not in _NO_MATTER:
            yield from _flat(f"{name}.{key}".lstrip("."), value[key])
