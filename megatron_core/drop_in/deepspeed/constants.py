"""Constants of DeepSpeed's launcher."""

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
