"""The commands that ask a model."""
