"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on."""
