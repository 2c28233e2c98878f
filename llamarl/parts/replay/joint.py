"""The joint of replays: the core opens nothing of them but the command."""
