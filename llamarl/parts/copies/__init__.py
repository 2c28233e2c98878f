"""Copies of checkpoints elsewhere, and of the newest states in memory."""
