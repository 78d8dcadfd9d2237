"""Transformer Engine's names at their path before release 0.10."""
