"""Ranks, their processes and what part of a tensor each holds; the only home of process-wide torch set-up."""
