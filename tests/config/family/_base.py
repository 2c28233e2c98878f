"""A helper: its name begins with `_`, so it is no member."""
