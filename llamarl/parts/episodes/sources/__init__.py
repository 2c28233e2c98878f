"""Data sources for agents of this part."""
