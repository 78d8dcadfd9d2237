"""For Megatron Core's users: positions."""
