"""What a run shows and keeps: metrics, spans, the screen and the report. Holds no state of the loop."""
