"""Policy-gradient losses. Each returns a sum; the trainer divides once by the global count."""
