"""Distillation from stored logits of a teacher."""

from megatron.training.distillation.cached_logits_loss import LossFuncCallable
