"""Losses, advantages and rewards' shaping: pure functions, one file each."""
