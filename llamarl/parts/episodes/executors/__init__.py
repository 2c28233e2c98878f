"""Processes that answer turns, or run the agents that ask for them."""
