"""Prompt sources, the tokenizer and its chat template, and the order in which prompts are drawn. Imports no torch."""
