"""Shared by all other folders: trees, vectors, noise, hyperparameters, devices."""
