"""Files of the MNN engine: dumps, prefix caches, live cache files, model directories."""
