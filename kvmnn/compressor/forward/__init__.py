"""Run KV compressors on caches, in numpy or onnxruntime."""
