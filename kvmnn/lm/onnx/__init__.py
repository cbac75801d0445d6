"""Load an ONNX file as a running graph: its inputs and outputs, and the tensors that kvmnn adds (docs/decoders.md)."""
