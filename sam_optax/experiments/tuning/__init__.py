"""The search of ``compare --tune``: radius, weight decay and stopping epoch of each method."""
