"""Metrics, spans, the screen and the report: all that a run shows and keeps. Holds no state of the loop."""
