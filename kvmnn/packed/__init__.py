"""K and V in the packed layouts of MNN (docs/layout.md): addressing, moving tokens, caches."""
