"""Members of the family of rewards that need the judge of programs."""
