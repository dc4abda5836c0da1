"""What a run leaves behind: results as data, tables, figures, the page, and progress on the way."""
