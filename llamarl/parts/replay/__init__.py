"""A run again from its record, beside what it was."""
