"""Recomputation of activations."""
