"""From an ONNX file to a graph that runs: what it takes and gives, and what is added (docs/decoders.md)."""
