"""Megatron-LM's use of ModelOpt (quantization, pruning, distillation), which is not supported."""
