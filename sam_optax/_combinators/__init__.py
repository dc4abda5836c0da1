"""What evaluates gradients and drives a base optimizer with them."""
