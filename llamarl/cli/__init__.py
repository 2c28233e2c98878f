"""The command line. Imports no torch, so that help, config errors and plans appear in under a second."""
