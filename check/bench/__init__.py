"""Measures what the ranks say to each other."""
