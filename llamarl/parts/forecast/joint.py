"""The joint of forecasts: what `llamarl train --dry-run` says."""

from llamarl.parts.forecast.cli.explain import explained

__all__ = ["explained"]
