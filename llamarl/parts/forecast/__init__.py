"""Forecasts of a run before it runs: hardware, costs, theory, the search for a layout, a simulator. No torch."""
