"""Which part of each parameter every rank holds, and who sends what to whom. No torch."""
