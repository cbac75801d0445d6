"""KV compressors run on caches, in numpy or onnxruntime."""
