"""Trackers, which send metrics where users look already, besides `metrics.jsonl`. One file per member."""
