"""llamarl: asynchronous, distributed reinforcement learning for language models, after the LlamaRL paper."""

__version__ = "0.1.0"
