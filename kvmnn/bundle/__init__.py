"""Frame files and their manifest: written, read, decoded, compared."""
