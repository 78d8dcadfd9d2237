"""Quantization recipes by layer, which are not supported."""
