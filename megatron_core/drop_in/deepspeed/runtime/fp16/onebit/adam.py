"""``OnebitAdam``, which the JSON sets."""

from deepspeed.unavailable import refused

OnebitAdam = refused(
    "deepspeed.runtime.fp16.onebit.adam.OnebitAdam", 'set "optimizer": {"type": "OneBitAdam"} in the JSON'
)
