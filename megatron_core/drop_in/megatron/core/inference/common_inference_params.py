"""The former name of the settings of sampling."""

from megatron.core.inference.sampling_params import CommonInferenceParams
