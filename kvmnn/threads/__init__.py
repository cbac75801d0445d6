"""The thread pool, ordered pipelines over it, and hashing beside the work."""
