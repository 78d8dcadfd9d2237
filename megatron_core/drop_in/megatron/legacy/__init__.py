"""Megatron-LM's models from before ``megatron.core``."""
