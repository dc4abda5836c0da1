"""``python -m sam_optax bench``: what a training step of each method costs."""
