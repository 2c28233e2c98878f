"""The joint of replays: the core uses only the command."""
