"""Generation by the user's installation of vLLM, in a separate process."""
