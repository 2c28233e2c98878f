"""The one exception for a user's mistake."""


class ConfigError(ValueError):
    """A setting that cannot work: the message names the option, its value and the fix, in one sentence."""
