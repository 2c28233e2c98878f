"""Advantages: rewards of one group in, one number per rollout out."""
