"""A judge of untrusted programs."""
