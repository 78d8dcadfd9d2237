"""Names of ``megatron.training``, which ``named_modules.yaml`` lists."""
