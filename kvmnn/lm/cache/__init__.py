"""The KV cache of a language model, layer by layer, cut as a policy says."""
