"""Files that ``torch.save`` writes, read as data: torch is not needed, and no pickle is executed."""
