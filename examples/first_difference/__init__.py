"""Programs with other libraries' parallelism whose public bugs ``megatron_core.verify.compare`` locates."""
