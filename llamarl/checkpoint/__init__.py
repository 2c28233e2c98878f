"""Checkpoints: safetensors and a JSON manifest, written whole or not at all. No pickle."""
