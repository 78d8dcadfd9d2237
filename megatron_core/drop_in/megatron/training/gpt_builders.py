"""The model of the arguments, as a function of Megatron-LM's programs."""

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.training.argument_utils import gpt_config_from_args


def gpt_builder(
    args: Namespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build a stage of the GPT of ``args``; ``config`` is a ``TransformerConfig`` or None for that of ``args``."""
    settings = gpt_config_from_args(args, config)
    model: GPTModel = settings.get_builder_cls()(settings).build_model(
        pg_collection, pre_process, post_process, vp_stage
    )
    return model
