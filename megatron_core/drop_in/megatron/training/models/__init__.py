"""Configurations of models and their builders."""

from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
