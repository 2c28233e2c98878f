"""Commands of runs on several hosts."""
