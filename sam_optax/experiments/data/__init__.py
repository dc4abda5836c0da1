"""Data sets: where they come from, how they are split, scaled and corrupted."""
