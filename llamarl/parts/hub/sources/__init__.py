"""Data sources that read the Hub."""
