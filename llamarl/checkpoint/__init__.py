"""Checkpoints: safetensors and a JSON manifest. A checkpoint is written completely or not at all. No pickle."""
