"""Not available: automatic tensor parallelism."""

from deepspeed.unavailable import refuse

refuse("deepspeed.module_inject", "split the model with megatron_core.parallelize (docs/shard_my_model.md)")
