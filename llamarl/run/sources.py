"""Sources of a mixture and sets of held-out problems, which both stand for a run of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llamarl.config import ConfigError, RunConfig
from llamarl.config.data import OF_EVAL
from llamarl.config.ref import part


def environment_of(config: RunConfig) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Tools that the chat template tells the policy of, and strings that end a turn. Raises ConfigError."""
    if config.rollout.environment is None:
        return [], ()
    environment = part("episodes", "build_environment")(config.rollout.environment)
    return environment.tools(), tuple(environment.stop)


def source_name(label: str) -> str:
    """Text for a source, by `Prompt.source`."""
    return f"data.eval ({label.removeprefix(OF_EVAL)})" if label.startswith(OF_EVAL) else f"source {label!r}"


@contextmanager
def of_source(label: str) -> Iterator[None]:
    """Says of which source of a mixture, or set of held-out problems, a ConfigError is; one without a label stays as it
    is."""
    try:
        yield
    except ConfigError as error:
        if not label:
            raise
        raise ConfigError(f"{source_name(label)}: {error}") from error.__cause__
