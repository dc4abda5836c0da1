"""The trainer: tasks, steps, runners and the loop that several methods share."""
