"""Executors: one thin file for each role, which joins the parts below to the controller and holds no logic."""
