"""Gates over the rows of one case: limits, figures, verdicts, and what they do not show."""
