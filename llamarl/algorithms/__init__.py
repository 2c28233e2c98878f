"""Losses, advantages, filters: pure functions, one file each."""
