"""Layer specifications of hybrid models of ModelOpt, which are not supported."""

from megatron.core.post_training.modelopt.gpt.model_specs import (
    get_gpt_modelopt_spec as get_hybrid_stack_modelopt_spec,
)
