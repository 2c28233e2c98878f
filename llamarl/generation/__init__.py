"""The native generation engine: continuous batching over a paged KV cache. `engine.Engine` is the way in."""
