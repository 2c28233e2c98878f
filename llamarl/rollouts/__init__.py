"""What happens to rollouts between generator and trainer: admission, packing, recording."""
