"""Caches of Hugging Face transformers: in memory, and as torch.save stores them."""
