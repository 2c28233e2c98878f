"""A run on several hosts: who has come, who computes where, how they trust each other, what schedulers are handed."""
