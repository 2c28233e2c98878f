"""Asking a model that exists: prompts to answer, held-out problems to score."""
