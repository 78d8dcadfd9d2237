"""Not available: elastic training."""

from deepspeed.unavailable import refuse

refuse("deepspeed.elasticity", "restart with another number of ranks; checkpoints load with any number")
