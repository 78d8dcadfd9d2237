"""Models with Megatron Core's names."""
