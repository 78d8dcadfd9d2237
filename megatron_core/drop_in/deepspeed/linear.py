"""Not available: optimized linear layers."""

from deepspeed.unavailable import refuse

refuse("deepspeed.linear", "use the layers of torch or of peft")
