"""Data sets of its training."""
