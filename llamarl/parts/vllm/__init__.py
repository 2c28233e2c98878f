"""Generation by the user's own vLLM, in a process of its own."""
