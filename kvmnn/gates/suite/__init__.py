"""Run the six cases on a model; every figure is measured in the run itself."""
