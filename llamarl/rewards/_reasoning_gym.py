"""The package reasoning-gym: its problems, and its scores of answers. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from llamarl.config import ConfigError


def problems(family: str, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    """Returns the first `size` problems of a seed. Raises ConfigError."""
    try:
        return import_module("reasoning_gym").create_dataset(family, size=size, seed=seed, **options)
    except ImportError as error:
        raise ConfigError(f"reasoning_gym needs a package ({error}): pip install 'llamarl[reasoning-gym]'") from None
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning_gym, family = {family!r}, options = {dict(options)}: {error}") from None


def verify(item: dict[str, str]) -> float:
    """Returns the score, 0 to 1, of `item["answer"]` for the problem `item["entry"]`, which is JSON."""
    score = import_module("reasoning_gym").get_score_answer_fn(item["family"])
    return float(score(item["answer"], json.loads(item["entry"])))
