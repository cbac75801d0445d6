"""Files on disk: mapped for reading, complete or absent after writing, bounded JSON."""
