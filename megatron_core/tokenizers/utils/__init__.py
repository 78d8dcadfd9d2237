"""For Megatron Core's users: see ``build_tokenizer``."""
