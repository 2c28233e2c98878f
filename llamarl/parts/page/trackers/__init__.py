"""Trackers, which send metrics to other tools in addition to `metrics.jsonl`. One file per tracker."""
