"""The methods that the experiments know."""
