"""Generation under Megatron Core's names."""
