"""The command that serves a model to other programs."""
