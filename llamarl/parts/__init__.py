"""Each folder is something that the core does without: it is opened by its name, and may be deleted."""
