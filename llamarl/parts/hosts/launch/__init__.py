"""The same run under a scheduler: templates, and what fills them."""
