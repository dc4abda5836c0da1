"""Data sets: loading, splitting, scaling and label noise."""
