"""The real controller under a virtual clock: its loops, buffer and policies over executors that only take time."""
