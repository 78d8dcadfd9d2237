"""Experts: names that programs import; a layer with experts is one of ``megatron_core.transformer.moe``."""
