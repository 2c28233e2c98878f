"""Runs work that may hang, die or use up memory in processes that can be killed. No torch."""
