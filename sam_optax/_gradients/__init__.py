"""Gradient functions: over microbatches, on part of a batch, on chosen examples."""
