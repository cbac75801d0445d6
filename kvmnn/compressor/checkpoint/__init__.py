"""PyTorch and safetensors checkpoints read as data; no pickle is executed."""
