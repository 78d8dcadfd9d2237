"""The settings of a GPT and its builder."""

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import parallel_state
from megatron_core.errors import ConfigError


@dataclass(kw_only=True)
class GPTModelConfig:
    """Arguments of ``GPTModel`` with the ``TransformerConfig`` in ``transformer``.

    ``transformer_layer_spec`` is a specification, a function of this object that returns one, or None for the layers of
    ``transformer``. ``should_pad_vocab`` rounds ``vocab_size`` up to a multiple of ``make_vocab_size_divisible_by``.
    Attributes of ``transformer`` can be read here.
    """

    transformer: TransformerConfig
    transformer_layer_spec: Any = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    should_pad_vocab: bool = False
    seq_length: int = 1024
    fp16_lm_cross_entropy: bool = False
    logit_dtype: torch.dtype | None = None
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    scatter_embedding_sequence_parallel: bool = True
    seq_len_interpolation_factor: float | None = None

    builder: ClassVar[str] = "megatron.training.models.gpt.GPTModelBuilder"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "transformer":
            raise AttributeError(name)
        return getattr(self.transformer, name)

    def get_builder_cls(self) -> type["GPTModelBuilder"]:
        """Return the class that builds the model."""
        return GPTModelBuilder


_OWN = ("transformer", "transformer_layer_spec", "vocab_size", "make_vocab_size_divisible_by", "should_pad_vocab")
_PASSED = [each.name for each in fields(GPTModelConfig) if each.name not in (*_OWN, "seq_length")]
"""The fields that are arguments of ``GPTModel`` with the same name."""


class GPTModelBuilder:
    """Builds the stages of the model of a ``GPTModelConfig``."""

    def __init__(self, model_config: GPTModelConfig) -> None:
        self._model_config = model_config

    def build_model(
        self,
        pg_collection: Any = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Build this rank's stage, or its chunk ``vp_stage``.

        The defaults of ``pre_process`` and ``post_process`` are whether the chunk is the first and the last one. Raises
        ConfigError without a ``vocab_size`` and for unsupported settings.
        """
        own, config = self._model_config, self._model_config.transformer
        if own.vocab_size is None:
            raise ConfigError("GPTModelConfig: vocab_size=None; set the number of tokens")
        spec = own.transformer_layer_spec
        if spec is None:
            spec = get_gpt_decoder_block_spec(config, False, config.normalization, config.qk_l2_norm)
            last = get_gpt_decoder_layer_specs(config, False, config.normalization, config.qk_l2_norm)[-1]
        else:
            spec = last = spec(own) if callable(spec) and not isinstance(spec, ModuleSpec) else spec
        size = own.vocab_size
        if own.should_pad_vocab:
            unit = {"make_vocab_size_divisible_by": own.make_vocab_size_divisible_by, "tensor_model_parallel_size": 1}
            size = vocab_size_with_padding(size, Namespace(**unit))
        first, end = pre_process, post_process
        return GPTModel(
            config,
            spec,
            size,
            own.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage) if first is None else first,
            post_process=parallel_state.is_pipeline_last_stage(False, vp_stage) if end is None else end,
            mtp_block_spec=get_gpt_mtp_block_spec(config, last, False, vp_stage),
            vp_stage=vp_stage,
            pg_collection=pg_collection,
            **{name: getattr(own, name) for name in _PASSED},
        )
