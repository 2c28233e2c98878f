"""Places where executors run: one interface, one process per rank (Monarch) or one thread per executor (inline)."""
