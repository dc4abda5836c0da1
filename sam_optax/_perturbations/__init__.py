"""The methods, and the pieces they are made of: each maps the ascent gradient to ε."""
