"""Models and data sets by name from the Hugging Face Hub. Its client runs in a process of its own; no torch here."""
