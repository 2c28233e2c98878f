"""The trainer: packed forward and backward, optimizer, log-probabilities, and the supervised warm start."""
