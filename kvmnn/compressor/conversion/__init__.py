"""Checkpoints to KVCM files: selection, rounding, conversion, verification, inspection, export."""
