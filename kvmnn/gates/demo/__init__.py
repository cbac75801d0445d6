"""The gate of real prompts: runs of ``llm_demo`` without and with the compressed cache."""
