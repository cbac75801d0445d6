"""`kvmnn bench`: codecs side by side on the same data."""
