"""Megatron-LM's data sets before ``megatron.core``, which are not supported."""
