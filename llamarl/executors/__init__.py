"""Executors: one thin file per role, which connects lower packages to the controller and holds no logic itself."""
