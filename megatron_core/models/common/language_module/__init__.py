"""For Megatron Core's users: the base class of language models."""
