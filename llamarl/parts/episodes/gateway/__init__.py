"""Outside programs that ask the policy over OpenAI's protocol: sessions, and the endpoint that records them."""
