"""Offload to disk."""

MIN_SWAPPABLE_BYTES = 1024 * 1024
"""Size below which DeepSpeed keeps a tensor in memory; here all state goes to disk."""
