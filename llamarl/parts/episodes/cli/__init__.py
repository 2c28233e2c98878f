"""The command that answers other programs."""
