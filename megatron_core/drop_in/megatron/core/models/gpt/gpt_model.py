"""A GPT, or one stage of it, with Megatron Core's arguments."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding, LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import current_seed
from megatron.core.transformer.exported import LossCollector, adopt, check_padding_mask, refuse
from megatron.core.transformer.layer_context import (
    LayerPattern,
    SampleNumbers,
    layer_context,
    layer_specs_of,
    stage_layers,
)
from megatron.core.transformer.module import sharded
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, MultiTokenPredictionBlock
from megatron.core.transformer.names import names_of_moved, with_global_number
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import LAYER_PARTS, TransformerLayer
from megatron_core.errors import ConfigError
from megatron_core.features.experts import replay
from megatron_core.features.experts.layer import moe_loss_names
from megatron_core.features.offload.activations import offload_activations
from megatron_core.models.gpt import model
from megatron_core.parallel.collectives import all_reduce_, gather_from_sequence
from megatron_core.parallel.current import current
from megatron_core.parallel.micro_batch import LaterTokens, SequenceDetails, SequenceSplit
from megatron_core.transformer import context
from megatron_core.transformer.auxiliary_loss import MicroBatchAuxiliaryLosses
from megatron_core.transformer.context import ForwardState
from megatron_core.transformer.layer_spec import auxiliary_loss_names, mtp_loss_names

_CLASSES = (LanguageModelEmbedding, TransformerBlock, TransformerLayer, *LAYER_PARTS, MultiTokenPredictionBlock)


class GPTModel(LossCollector, LanguageModule, model.GPTModel):
    """The engine's ``GPTModel`` built from a ``TransformerConfig`` and a layer specification, see ``layer_specs_of``.

    It has the layers of this pipeline rank and chunk ``vp_stage``, with their global numbers in ``state_dict``. Weights
    and dropout depend on the seed of ``model_parallel_cuda_manual_seed`` (default 1234), on names and on the numbers of
    the sequences, never on ranks. Losses of experts and of multi-token prediction (``config.mtp_num_layers``) take part
    in the backward pass, as means over each micro-batch. Unsupported arguments raise ConfigError.
    """

    _input_tensor: Tensor | None = None
    _gathers = True

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
        _check_arguments(config, locals())
        # The engine's configuration of the model; Megatron passes some of its settings as arguments.
        passed: dict[str, Any] = {
            "rotary_percent": rotary_percent,
            "rotary_base": float(rotary_base),
            "rotary_seq_len_interpolation_factor": seq_len_interpolation_factor,
        }
        if isinstance(transformer_layer_spec, LayerPattern):
            passed["hybrid_layer_pattern"] = transformer_layer_spec.letters
            passed["mtp_layer_pattern"] = transformer_layer_spec.ahead
            passed |= transformer_layer_spec.settings
        if logit_dtype == torch.float32:
            passed["output_logit_dtype"] = "fp32"
        if rope_scaling:
            passed |= {"use_rope_scaling": True, "rope_scaling_factor": rope_scaling_factor}
        own = config.model_config(
            position_embedding_type=position_embedding_type,
            untie_embeddings_and_output_weights=not share_embeddings_and_output_weights,
            make_vocab_size_divisible_by=1,
            max_position_embeddings=max_sequence_length,
            **passed,
        )
        # Build this stage with the process groups of the current layout.
        groups, specs = current(), layer_specs_of(config, transformer_layer_spec)
        _check_stages(config, groups)
        model.GPTModel.__init__(
            self,
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
            layer_specs=specs,
        )
        offload_activations(self.decoder)
        # Megatron's attributes, and Megatron's classes for the layers.
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output, self.vp_stage = parallel_output, vp_stage
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.samples, self._groups, self._context_group = SampleNumbers(groups), groups, groups.group("cp")
        self._loss_names = auxiliary_loss_names(own, specs)
        self.expert_layers = own.counting_layers[0]
        adopt(self, _CLASSES, config, layer_context(config, own, pg_collection), None, self.samples)
        self._replay = None
        if config.moe_enable_routing_replay:
            self._replay = _Replay({n: RouterReplay() for n in stage_layers(config, vp_stage) if own.has_experts(n)})

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the previous stage's output for the next ``forward``."""
        self._input_tensor = input_tensor

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None,
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
        padding_mask: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
        sample_index: Tensor | None = None,
    ) -> Tensor:
        """Return losses ``[b, s]`` with ``labels``, else logits ``[b, s, v]``; ``[s, b, h]`` before the last stage.

        With ``parallel_output`` logits are this rank's part. A mask is ``[b, 1, s, s]``, or with context parallelism
        the rows of this rank, True where a query must not see a key; None is causal and faster. A stage without
        embedding and loss needs no ``input_ids``. ``packed_seq_params`` has the borders of documents. ``padding_mask``
        ``[b, s]`` is True for tokens that do not count in losses and loads of experts, by default tokens whose
        ``loss_mask`` is 0. ``sample_index`` ``[b]`` keys dropout; by default sequences are numbered in order.
        """
        refuse("GPTModel.forward", locals())
        if input_ids is None:
            input_ids = self._received_tokens()
        attention_mask = self._whole_mask(attention_mask)
        if sample_index is None and self.training:
            sample_index = self.samples.take(len(input_ids), input_ids.device)
        documents = None
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            length = input_ids.shape[1] * self.split.cp_size
            documents, attention_mask = packed_seq_params.document_lengths(len(input_ids), length), None
        check_padding_mask(self.model_config, padding_mask)
        counted = loss_mask if padding_mask is None else ~padding_mask.bool()
        auxiliary, later = self._auxiliary(input_ids, labels, loss_mask, counted, documents)
        self._gathers = not self.parallel_output if runtime_gather_output is None else runtime_gather_output
        hidden_states, self._input_tensor = self._input_tensor, None
        output: Tensor = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            hidden_states=hidden_states,
            labels=labels,
            sequences=SequenceDetails(
                sample_index=sample_index, document_lengths=documents, loss_mask=counted, later=later
            ),
            state=ForwardState(router_replay=self._replay, auxiliary_losses=auxiliary),
        )
        if auxiliary is not None:
            self._log_expert_losses()
        if later is not None:
            self._log_later_losses()
        return output if labels is None or not self.post_process else output.contiguous()

    def _log_expert_losses(self) -> None:
        """Add the losses of the layers of experts of this micro-batch to the tracker of ``moe_logging``."""
        losses, names, tracker = self.auxiliary_losses, moe_loss_names(self.model_config), get_moe_metrics_tracker()
        layers = self.model_config.num_layers + self.model_config.added_layers
        for (name, layer, _), (value, terms, is_partial) in losses.values.items() if losses is not None else ():
            if name in names:
                group = self._groups.group("tp-cp" if is_partial else "cp")
                tracker.record(name, value / terms, layer + 1, layers, group)

    def _log_later_losses(self) -> None:
        """Add the losses of multi-token prediction of this micro-batch to ``MTPLossLoggingHelper``."""
        names, losses = mtp_loss_names(self.model_config), self.auxiliary_losses
        assert losses is not None, "_auxiliary has made them"
        device = next(self.parameters()).device
        group = ProcessGroupCollection.use_mpu_process_groups(["dp_cp"]).dp_cp
        sums, counts, _ = losses.totals(device, owns_loss=True).view(3, -1)
        for depth, at in enumerate(losses.names.index(name) for name in names):
            MTPLossLoggingHelper.save_loss_to_tracker(sums[at] / counts[at], depth, len(names), avg_group=group)

    def _received_tokens(self) -> Tensor:
        """Return zeros ``[b, s]`` as tokens, for a stage without embedding that received hidden states."""
        if self.embedding is not None or self._input_tensor is None:
            raise ConfigError("GPTModel.forward: input_ids=None on a stage that embeds tokens; pass the tokens")
        residual, batch, _ = self._input_tensor.shape
        length = residual * (self.split.tp_size if self.split.sequence_parallel else 1)
        return torch.zeros(batch, length, dtype=torch.int64, device=self._input_tensor.device)

    def _whole_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the mask of whole sequences ``[b, 1, s, s]``, gathered if it has only the rows of this rank."""
        size = self.split.cp_size
        if mask is None or size == 1 or mask.shape[-2] == mask.shape[-1]:
            return mask
        rows = gather_from_sequence(mask.permute(2, 0, 1, 3).to(torch.uint8).contiguous(), self._context_group)
        ranks = [replace(self.split, cp_rank=rank) for rank in range(size)]
        order = torch.cat([each.positions(mask.shape[-1], mask.device) for each in ranks])
        return rows[order.argsort()].permute(1, 2, 0, 3).to(mask.dtype)

    def _auxiliary(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        counted: Tensor | None,
        documents: Any,
    ) -> tuple[MicroBatchAuxiliaryLosses | None, LaterTokens | None]:
        """Return the collector of auxiliary losses and the labels of multi-token prediction; None outside training."""
        adds = self._loss_names or self.model_config.moe_router_enable_expert_bias
        if not adds or not self.training or not torch.is_grad_enabled():
            return None, None
        mask = torch.ones_like(input_ids, dtype=torch.float32) if loss_mask is None else loss_mask
        depths, later = self.model_config.mtp_num_layers or 0, None
        if self.mtp is not None and labels is not None:
            whole = {"labels": labels, "loss_mask": mask}
            if documents is not None:
                whole["document_lengths"] = pad_sequence([torch.tensor(own) for own in documents], batch_first=True)
            later = LaterTokens.of(whole, depths, SequenceSplit(), input_ids.device)
        tokens = (mask if counted is None else counted).sum(dtype=torch.float64)
        all_reduce_(tokens, self._context_group)
        collected = self.collect_losses(
            self.model_config,
            self._loss_names,
            sequences=len(input_ids),
            tokens=tokens,
            per_token=self.config.calculate_per_token_loss,
            counts={} if later is None else self._counts(later),
        )
        return collected, later

    def _counts(self, later: LaterTokens) -> dict[str, Tensor]:
        sums = later.masks.sum((1, 2), dtype=torch.float64).clamp_min(1.0)
        return dict(zip(mtp_loss_names(self.model_config), sums, strict=True))

    def _logits(self, logits: Tensor) -> Tensor:
        return super()._logits(logits) if self._gathers or self.tp_group.size() == 1 else logits

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Return the weight of the embedding, which a tied output layer shares."""
        return self._shared_weight()

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with the engine's names, which checkpoints use."""
        moved = dict(names_of_moved(self))
        for name, parameter in model.GPTModel.named_global_parameters(self):
            yield self.global_name(moved.get(id(parameter), name)), parameter

    def global_name(self, name: str) -> str:
        """The name of an entry of ``state_dict`` with the global number of its layer."""
        # While the constructor draws weights, layers still have their global numbers.
        numbers = dict(zip(self.decoder.layers.keys(), self.decoder.layer_numbers, strict=True))
        return with_global_number(name, numbers)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return every parameter as a part of a global tensor, by its name in ``state_dict``."""
        return sharded(self, prefix)


class _Replay(replay.RouterReplay):
    """Answers the engine's layers from the ``RouterReplay`` of each, which the caller controls."""

    def __init__(self, layers: dict[int, RouterReplay]) -> None:
        super().__init__()
        self._layers = layers

    def experts(self, layer_number: int, chosen: Tensor) -> Tensor:
        """Return the experts ``[n, b, k]`` of a layer; the caller's tensors are ``[n b, k]``."""
        return self._layers[layer_number].replayed(chosen.flatten(0, 1)).view_as(chosen)


def _check_arguments(config: TransformerConfig, given: dict[str, Any]) -> None:
    """Raise ConfigError for unsupported arguments of ``GPTModel``."""
    has_mtp = bool(config.mtp_num_layers)
    refused = {
        "fp16_lm_cross_entropy": given["fp16_lm_cross_entropy"],
        "logit_dtype": given["logit_dtype"] not in (None, config.params_dtype, torch.float32),
        "scatter_embedding_sequence_parallel=False": not given["scatter_embedding_sequence_parallel"],
        "mtp_block_spec without mtp_num_layers": given["mtp_block_spec"] is not None and not has_mtp,
        "mtp_num_layers with context_parallel_size": has_mtp and config.context_parallel_size > 1,
        # It needs sums over the global batch, which only the engine's own training loop takes.
        "global_aux_loss": config.num_moe_experts and "global_aux_loss" in config.moe_router_load_balancing_type,
    }
    if wrong := [name for name, value in refused.items() if value]:
        raise ConfigError(f"GPTModel: {', '.join(wrong)} is not supported; remove it")
    kinds = ("learned_absolute", "rope", "none")
    if (kind := given["position_embedding_type"]) not in kinds:
        raise ConfigError(f"position_embedding_type={kind!r} is none of {', '.join(kinds)}")


def _check_stages(config: TransformerConfig, groups: Any) -> None:
    if groups.size("pp") > 1 and config.pipeline_model_parallel_size != groups.size("pp"):
        raise ConfigError(
            f"TransformerConfig has pipeline_model_parallel_size={config.pipeline_model_parallel_size}, but the "
            f"current groups have {groups.size('pp')} pipeline ranks; set it to this number"
        )
