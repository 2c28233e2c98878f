"""Weights from trainer to generators: the trainer publishes a version, generators adopt it."""
