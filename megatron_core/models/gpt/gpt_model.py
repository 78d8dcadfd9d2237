"""For Megatron Core's users: a GPT, or this rank's stage of one, with Megatron Core's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError
from megatron_core.models.gpt import model
from megatron_core.packed_seq_params import PackedSeqParams
from megatron_core.parallel.current import current
from megatron_core.parallel.sharded_tensor import ShardedTensor
from megatron_core.tensor_parallel.rng_tracker import current_seed
from megatron_core.transformer.layer_context import SampleNumbers, layer_specs_of
from megatron_core.transformer.module import sharded
from megatron_core.transformer.spec_utils import ModuleSpec
from megatron_core.transformer.stages import stage_layers
from megatron_core.transformer.transformer_config import TransformerConfig


class GPTModel(model.GPTModel):
    """``model.GPTModel`` built from a ``TransformerConfig`` and a layer's specification, see ``layer_specs_of``.

    The layers are those of this pipeline rank and of chunk ``vp_stage``. Weights and dropout depend on the seed of
    ``model_parallel_cuda_manual_seed`` (1234 before it is called), on names and on the numbers of the sequences, never
    on ranks; layers keep their global numbers in ``state_dict``. ConfigError for what is not supported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: Any = None,
        pg_collection: Any = None,
        vp_stage: int | None = None,
    ) -> None:
        refused = {
            "fp16_lm_cross_entropy": fp16_lm_cross_entropy,
            "logit_dtype": logit_dtype,
            "scatter_embedding_sequence_parallel=False": not scatter_embedding_sequence_parallel,
            "mtp_block_spec": mtp_block_spec,
            "mtp_num_layers": config.mtp_num_layers,
            # A training loop of this package counts them over the whole batch; the caller's has no place for them.
            "moe_aux_loss_coeff": config.num_moe_experts and config.moe_aux_loss_coeff,
            "moe_z_loss_coeff": config.num_moe_experts and config.moe_z_loss_coeff,
            "moe_router_enable_expert_bias": config.num_moe_experts and config.moe_router_enable_expert_bias,
        }
        if wrong := [name for name, value in refused.items() if value]:
            raise ConfigError(f"GPTModel: {', '.join(wrong)} is not supported; leave it out")
        kinds = {"learned_absolute": "learned_absolute", "rope": "rope", "none": "none"}
        if position_embedding_type not in kinds:
            raise ConfigError(f"position_embedding_type={position_embedding_type!r} is none of {', '.join(kinds)}")
        rotary = {
            "rotary_percent": rotary_percent,
            "rotary_base": float(rotary_base),
            "rotary_seq_len_interpolation_factor": seq_len_interpolation_factor,
        }
        if rope_scaling:
            rotary |= {"use_rope_scaling": True, "rope_scaling_factor": rope_scaling_factor}
        own = config.model_config(
            position_embedding_type=position_embedding_type,
            untie_embeddings_and_output_weights=not share_embeddings_and_output_weights,
            make_vocab_size_divisible_by=1,
            max_position_embeddings=max_sequence_length,
            **rotary,
        )
        groups = current()
        _check_stages(config, groups)
        super().__init__(
            own,
            vocab_size,
            max_sequence_length,
            parallel=config.parallel_options(),
            layers=stage_layers(config, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            tp_group=getattr(pg_collection, "tp", None),
            groups=groups,
            seed=current_seed(),
            layer_specs=layer_specs_of(config, transformer_layer_spec),
        )
        self.config = config
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output, self.vp_stage = parallel_output, vp_stage
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self._samples = SampleNumbers(groups)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
        sample_index: Tensor | None = None,
    ) -> Tensor:
        """Losses ``[b, s]`` with ``labels``, else logits ``[b, s, vocabulary]`` (this rank's part of it with
        ``parallel_output``); ``[s, b, h]`` before the last stage.

        A mask is ``[b, 1, s, s]``, True where a query must not see a key; None is causal, and faster.
        ``packed_seq_params`` says where documents lie. ``sample_index`` ``[b]`` keys dropout; by default sequences are
        counted as they come.
        """
        refused = (decoder_input, inference_context, extra_block_kwargs, inference_params)
        if any(value is not None for value in refused):
            raise ConfigError("decoder_input, inference_context and extra_block_kwargs are not supported; leave out")
        if sample_index is None and self.training:
            sample_index = self._samples.take(len(input_ids), input_ids.device)
        documents = None
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            length = input_ids.shape[1] * self.split.cp_size
            documents, attention_mask = packed_seq_params.document_lengths(len(input_ids), length), None
        self._gathers = not self.parallel_output if runtime_gather_output is None else runtime_gather_output
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            labels=labels,
            sample_index=sample_index,
            document_lengths=documents,
            loss_mask=loss_mask,
        )

    def _logits(self, logits: Tensor) -> Tensor:
        return super()._logits(logits) if self._gathers or self.tp_group.size() == 1 else logits

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """The weight that embeds tokens and, when tied, scores them."""
        return self._shared_weight()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """``state_dict`` under Megatron's name."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Every parameter as a part of a global tensor, by its name in ``state_dict``."""
        return sharded(self, prefix)


def _check_stages(config: TransformerConfig, groups: Any) -> None:
    if groups.size("pp") > 1 and config.pipeline_model_parallel_size != groups.size("pp"):
        raise ConfigError(
            f"TransformerConfig has pipeline_model_parallel_size={config.pipeline_model_parallel_size}, but the "
            f"current groups have {groups.size('pp')} pipeline ranks; set it, so that each stage gets its layers"
        )
