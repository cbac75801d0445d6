"""Folders of streams that a model's profile codes: one for each layer, and ``layers.json`` (docs/profile.md)."""
