"""A run from what was asked for to its end."""
