"""The version of torch."""

from deepspeed.runtime.utils import required_torch_version as required_torch_version
