"""What every other folder builds on: trees, vectors, noise, hyperparameters, devices."""
