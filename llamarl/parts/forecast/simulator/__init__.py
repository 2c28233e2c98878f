"""Runs the real controller under a virtual clock, with executors that only consume time."""
