"""Data sets under Megatron Core's names."""
