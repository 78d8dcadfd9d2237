"""``OnebitLamb``, which the JSON sets."""

from deepspeed.unavailable import refused

OnebitLamb = refused(
    "deepspeed.runtime.fp16.onebit.lamb.OnebitLamb", 'set "optimizer": {"type": "OneBitLamb"} in the JSON'
)
