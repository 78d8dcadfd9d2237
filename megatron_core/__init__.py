"""Megatron's parallelism on plain PyTorch. ``drop_in`` runs programs written for Megatron-LM."""
