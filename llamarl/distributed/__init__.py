"""Processes of an executor that compute together. Only this package changes torch's process-wide settings."""
