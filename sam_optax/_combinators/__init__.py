"""Functions that combine a perturbation and a base optimizer into one optax optimizer."""
