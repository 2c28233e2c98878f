"""`layered`: a recipe comes below the settings of a user."""

from __future__ import annotations

from typing import Any

from llamarl.config import RunConfig


def layered(base: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """`base`, with `settings` wherever it was left open. A part and its options (`trainer.loss`) are one setting.

    Args:
        base: what a file and the command line set; fields that nobody set are open.
        settings: as in TOML, nested by section.

    Raises:
        pydantic.ValidationError: the two together cannot work.
    """
    return RunConfig.model_validate(_below(settings, base.model_dump(exclude_unset=True)))


def _below(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = lower | upper
    for key in lower.keys() & upper.keys():
        below, above = lower[key], upper[key]
        if isinstance(below, dict) and isinstance(above, dict) and "name" not in above:
            merged[key] = _below(below, above)
    return merged
