"""The command that fine-tunes."""
