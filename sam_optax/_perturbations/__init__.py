"""The SAM methods and the pieces they are composed of: each maps the ascent gradient to ε."""
