"""The only home of process-wide torch set-up: threads, devices, process groups."""
