"""The command ``analyze``, which measures the networks of finished runs."""
