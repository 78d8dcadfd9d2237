"""For Megatron Core's users: what a model is given in generation, for annotations."""

from megatron_core.inference_params import BaseInferenceContext, StaticInferenceContext
