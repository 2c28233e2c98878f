"""The joint of forecasts: what `llamarl train --dry-run` says."""

from llamarl.parts.forecast.cli.explain import built_in_model, explained

__all__ = ["built_in_model", "explained"]
