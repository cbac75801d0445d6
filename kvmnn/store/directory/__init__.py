"""A prefix store in a directory: index, unit files, maintenance."""
