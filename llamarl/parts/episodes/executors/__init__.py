"""Executors that reply to turns or run agents."""
