"""A page about runs: what is in their folders, read while they are written or afterwards; nothing is changed there."""
