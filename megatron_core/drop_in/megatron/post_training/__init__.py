"""Megatron-LM's use of ModelOpt (quantization, pruning, distillation), which this package does not have."""
