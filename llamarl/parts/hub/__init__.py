"""Models and datasets by name from the Hugging Face Hub. The Hub's client runs in a separate process; no torch here."""
