"""Megatron-LM's models before ``megatron.core``."""
