"""Results of an evaluation as Markdown, CSV, a terminal table, and plots; in `page` one page of all results."""
