"""Contexts of generation with Megatron Core's names."""
