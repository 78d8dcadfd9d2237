"""Optimizers that send one bit for each element: set by name in the JSON."""
