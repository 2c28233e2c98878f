"""Transports of weights from GPU to GPU."""
