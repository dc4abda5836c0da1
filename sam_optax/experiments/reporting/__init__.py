"""The output of a run: results as data, tables, figures, the report page, and progress."""
