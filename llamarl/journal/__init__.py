"""The journal of a run: rollouts, groups and steps on disk, which a crash of the controller does not lose.

`writer.py` writes it, `reader.py` reads it, and `records.py` has the format of its files.
"""
