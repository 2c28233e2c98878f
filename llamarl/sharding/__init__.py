"""Parts of each parameter on every rank, and the moves between layouts. No torch."""
