"""Mixtures of experts with Megatron Core's names."""
