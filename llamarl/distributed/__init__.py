"""Processes of an executor that compute together; the only home of process-wide torch set-up."""
