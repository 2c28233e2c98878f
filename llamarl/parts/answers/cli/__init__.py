"""Commands that query a model."""
