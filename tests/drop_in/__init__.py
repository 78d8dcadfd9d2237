import megatron_core.drop_in  # finds the modules of named_modules.yaml, whichever test is collected first
