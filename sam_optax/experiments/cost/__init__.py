"""``python -m sam_optax cost``: what a training step of each method costs."""
