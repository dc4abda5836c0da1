"""The search of ``compare --tune``: a radius and a stopping epoch for each method."""
