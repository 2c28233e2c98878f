"""Executors: one thin file for each role. They join the parts below to the controller and hold no logic of their own."""
