"""Transformations of the sharp gradient, for ``descent=``."""
