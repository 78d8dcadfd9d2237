"""Data sets with Megatron Core's names."""
