"""Mixtures of experts under Megatron Core's names."""
