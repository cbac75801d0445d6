"""Decoders for onnxruntime made of ``.gguf`` files and Hugging Face folders, without torch."""
