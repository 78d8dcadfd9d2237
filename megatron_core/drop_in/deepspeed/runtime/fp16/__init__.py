"""Optimizers of weights in 16 bits."""
