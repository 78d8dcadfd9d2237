"""Not available: sparse attention."""

from deepspeed.unavailable import refuse

refuse("deepspeed.ops.sparse_attention", "choose the attention in the model")
