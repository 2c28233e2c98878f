"""Ports that this package listens at; no torch."""
