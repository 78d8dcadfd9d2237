"""``ZeroOneAdam``, which the JSON sets."""

from deepspeed.unavailable import refused

ZeroOneAdam = refused(
    "deepspeed.runtime.fp16.onebit.zoadam.ZeroOneAdam", 'set "optimizer": {"type": "ZeroOneAdam"} in the JSON'
)
