"""Runs: preparation, executors, folders and files. Training, evaluation and simulation share this package."""
