"""The former name of the context of a batch that starts and ends together."""

from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.inference.contexts import StaticInferenceContext as InferenceParams
