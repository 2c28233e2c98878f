"""Rollouts of several turns: environments, agents of others, and the endpoint that they ask."""
