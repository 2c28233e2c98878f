"""Rollouts with several turns: environments, external agents, and the endpoint that agents call."""
