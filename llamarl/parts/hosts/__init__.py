"""A run on several hosts: registration, placement, certificates, and job scripts for schedulers."""
