"""Supervised fine-tuning, and the small base model that a first run begins with."""
