"""What is compared, on what: configurations, presets, documents, settings."""
