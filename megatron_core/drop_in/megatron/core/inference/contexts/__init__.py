"""What a model is given in generation, for annotations."""

from megatron.core.inference_params import BaseInferenceContext, StaticInferenceContext
