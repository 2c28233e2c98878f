"""Queries to an existing model: prompts to answer and held-out problems to score."""
