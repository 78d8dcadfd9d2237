"""Layer specifications of ModelOpt, which is not supported."""

from megatron_core.drop_in.unsupported import unsupported

get_gpt_modelopt_spec = unsupported("restore_modelopt_state needs ModelOpt, which is not supported; remove it")
