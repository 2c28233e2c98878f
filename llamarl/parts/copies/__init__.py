"""Copies of checkpoints in a mounted folder or a store that fsspec opens."""
