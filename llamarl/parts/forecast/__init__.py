"""Forecasts of a run before it starts: hardware, costs, theory, layout search, simulator. No torch."""
