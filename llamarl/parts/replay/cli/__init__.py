"""The command that repeats a run."""
