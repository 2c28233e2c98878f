"""One decoder definition, shared by trainer and generator, with Hugging Face parameter names and files."""
