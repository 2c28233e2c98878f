"""Typed, bounded, closable edges between executors."""
