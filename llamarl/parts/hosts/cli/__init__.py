"""Commands of a run on several hosts."""
