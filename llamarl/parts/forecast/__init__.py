"""What a run will take before it runs: hardware, costs, theory, the search for a layout, a simulator. No torch."""
