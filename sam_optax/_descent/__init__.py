"""Transformations for the base optimizer's chain, which change the sharp gradient."""
