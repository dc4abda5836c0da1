"""When a step perturbs, and how far."""
