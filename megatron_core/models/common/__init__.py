"""For Megatron Core's users: parts of models."""
