"""Cells run in this process or in others, and kept so that a run can be resumed."""
