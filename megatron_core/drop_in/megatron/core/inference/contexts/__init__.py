"""Contexts of generation, for annotations."""

from megatron.core.inference_params import BaseInferenceContext, StaticInferenceContext
