"""Collectives of several tensors at once."""
