"""What flows between files and codecs: named arrays, sources of them, and caches of K and V by layer."""
