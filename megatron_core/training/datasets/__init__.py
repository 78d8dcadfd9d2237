"""For Megatron-LM's users: data sets of its training."""
