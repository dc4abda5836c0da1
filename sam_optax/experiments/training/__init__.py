"""The trainer: tasks, steps, runners and the loop over several methods."""
