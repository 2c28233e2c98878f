"""Bring-up and assembly of a run: training, evaluation and simulation share it."""
