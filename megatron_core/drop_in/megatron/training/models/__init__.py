"""Configurations of models and their builders."""

from megatron.training.models.base import ModelBuilder, ModelConfig, compose_hooks
from megatron.training.models.dist_utils import build_virtual_pipeline_stages, unimodal_build_distributed_models
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig
from megatron.training.models.hybrid import HybridModelBuilder as MambaModelBuilder
from megatron.training.models.hybrid import HybridModelConfig as MambaModelConfig
from megatron.training.models.serializable import Serializable
