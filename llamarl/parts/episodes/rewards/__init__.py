"""Rewards that need the judge of programs."""
