"""`python -m llamarl`."""

from llamarl.cli.main import main

if __name__ == "__main__":
    main()
