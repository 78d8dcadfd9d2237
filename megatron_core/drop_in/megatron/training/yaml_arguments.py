"""Megatron-LM's experimental files of settings; use ``--config`` instead."""

from megatron_core.drop_in.unsupported import unsupported

core_transformer_config_from_yaml = unsupported("yaml_cfg is not supported; write the settings as --config FILE")
