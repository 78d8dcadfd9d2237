"""A model that generates, in one object."""

from megatron.core.inference.apis.llm import MegatronAsyncLLM, MegatronLLM
from megatron.core.inference.sampling_params import SamplingParams
