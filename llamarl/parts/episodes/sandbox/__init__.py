"""A judge of programs that nobody trusts."""
