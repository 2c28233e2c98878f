"""Environments, which answer a policy between its turns: tools, games, users. One file per member."""
