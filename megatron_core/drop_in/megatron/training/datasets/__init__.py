"""Megatron-LM's data sets for training."""
