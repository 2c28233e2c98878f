"""`python -m llamarl`."""

from llamarl.cli.main import script

if __name__ == "__main__":
    script()
