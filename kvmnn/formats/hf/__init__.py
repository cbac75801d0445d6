"""Caches of Hugging Face transformers: in memory, and saved by ``torch.save``."""
