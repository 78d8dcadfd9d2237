"""Distillation under Megatron-LM's names."""

from megatron.training.distillation.loss_func import LossFuncCallable
