"""Access to the policy for external programs over OpenAI's protocol: the endpoint, and sessions that record the
calls."""
