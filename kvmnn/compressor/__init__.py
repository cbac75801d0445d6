"""Weights of KV-cache compressors: KVCM files, the checkpoints they come from, and the way between them."""
