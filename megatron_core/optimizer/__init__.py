"""Optimizer, loss scale and learning rate."""
