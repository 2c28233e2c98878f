"""Repeats a run from its record and compares the result."""
