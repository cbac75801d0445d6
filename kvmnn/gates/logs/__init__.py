"""What the engine's two programs leave behind, as rows: tables of ``llm_bench``, records of ``llm_demo``."""
