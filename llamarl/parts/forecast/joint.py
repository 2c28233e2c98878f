"""The joint of forecasts: the output of `llamarl train --dry-run`."""

from llamarl.parts.forecast.cli.explain import built_in_model, explained

__all__ = ["built_in_model", "explained"]
