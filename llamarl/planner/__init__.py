"""Throughput and memory theory, and the search for the best layout. Imports no torch."""
