"""The six cases on a model: every figure from the run itself."""
