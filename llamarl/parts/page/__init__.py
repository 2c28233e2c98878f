"""Pages about runs, built from their folders during or after a run. Pages only read; they change no file of a run."""
