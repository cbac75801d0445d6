"""Files on disk: memory-mapped reading, atomic writing, bounded JSON."""
