"""Where metrics go besides `metrics.jsonl`, a file each: what users look at already."""
