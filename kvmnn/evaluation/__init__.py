"""What eviction costs a language model: configurations on documents, in cells, put together in rows (docs/lm.md)."""
