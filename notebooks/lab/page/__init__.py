"""What a page says and how: words, tables, figures, facts of the paper, verdicts."""
