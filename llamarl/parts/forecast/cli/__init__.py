"""Commands that say what a run will take."""
