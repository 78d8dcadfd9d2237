"""For Megatron Core's users: torch's norms under their former path."""
