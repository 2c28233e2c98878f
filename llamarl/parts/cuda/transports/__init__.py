"""Ways for weights from GPU to GPU."""
