"""The command line. Imports no torch: help, a config error or a plan answers in under a second."""
