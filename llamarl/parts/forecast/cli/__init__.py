"""Commands that estimate time, memory and cost of a run."""
