"""Layers of multi-token prediction, their labels and losses."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.core.enums import LayerType
from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import layer_context, layer_specs_of
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import LAYER_PARTS, TransformerLayer
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.features.multi_token import block as multi_token
from megatron_core.features.multi_token.block import MultiTokenPredictionLayer
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.transformer.layer_spec import auxiliary_loss_names


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """The specifications of these layers, which equal the model's last layer."""

    layer_specs: list[Any] = field(default_factory=list)


class MultiTokenPredictionBlock(ExportedModule, multi_token.MultiTokenPredictionBlock):
    """The layers that predict 2, 3, ... tokens ahead; ``spec`` is that of ``get_gpt_mtp_block_spec``."""

    stands_for = multi_token.MultiTokenPredictionBlock

    def __init__(
        self,
        config: TransformerConfig,
        spec: Any,
        vp_stage: int | None = None,
        pg_collection: Any = None,
        mtp_layer_pattern: str | None = None,
        mtp_num_depths: int = 0,
        hybrid_submodules: Any = None,
        mamba_submodules: Any = None,
        name: str | None = None,
    ) -> None:
        refuse("MultiTokenPredictionBlock", locals())
        parts = getattr(spec, "submodules", spec)
        if not config.mtp_num_layers or not isinstance(parts, MultiTokenPredictionBlockSubmodules):
            raise ConfigError(
                f"MultiTokenPredictionBlock: mtp_num_layers={config.mtp_num_layers} with {spec!r}; set mtp_num_layers, "
                "and take the specification from get_gpt_mtp_block_spec"
            )
        model = config.model_config()
        layer_spec = parts.layer_specs[0]
        specs = layer_specs_of(config, getattr(getattr(layer_spec, "submodules", None), "mtp_model_layer", layer_spec))
        context = layer_context(config, model, pg_collection)
        multi_token.MultiTokenPredictionBlock.__init__(self, context, 1, specs, own_embedding=False)
        self._loss_names = auxiliary_loss_names(model, specs)
        self.expert_layers = model.counting_layers[0]
        adopt(self, (*LAYER_PARTS, TransformerLayer), config, context, "mtp.")

    _loss_names: tuple[str, ...] = ()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        padding_mask: Tensor | None = None,
        context: Any = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Any = None,
        rotary_pos_sin: Any = None,
        attention_bias: Any = None,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        extra_block_kwargs: Any = None,
        embedding: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Hidden states ``[s, b, h]`` -> ``[(1 + n) s, b, h]``: the input and the output of each depth, for
        ``process_mtp_loss``. ``embedding(input_ids=, position_ids=)`` is the model's."""
        refuse("MultiTokenPredictionBlock.forward", locals())
        if embedding is None:
            raise ConfigError("MultiTokenPredictionBlock.forward: embedding=None; pass the model's embedding")
        outputs: list[Tensor] = [hidden_states]
        passed = self.sequence(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params, padding_mask)
        passed = self.with_losses(self._loss_names, hidden_states, passed)
        ids: Tensor | None = input_ids
        positions: Tensor | None = position_ids
        given = {"cp_group": self.context.cp.whole, "packed_seq_params": packed_seq_params}
        mixing = None if self.new_mixing is None or not self.training else self.new_mixing()
        for depth in range(self.config.mtp_num_layers or 0):
            (ids, _), (positions, _) = (roll_tensor(x, **given) for x in (ids, positions))
            hidden = outputs[-1] if mixing is None else mixing.input_of(depth, outputs[-1], passed)
            layer = self.layers[0 if self.repeats else depth]
            passed_on = replace(passed, repeat=depth if self.repeats else 0)
            outputs.append(layer(embedding(input_ids=ids, position_ids=positions), hidden, passed_on))
        return torch.cat(outputs)


def mtp_on_this_rank(
    layout: PipelineParallelLayerLayout | TransformerConfig | None = None,
    mtp_num_layers: int | None = None,
    ignore_virtual: bool = True,
    vp_stage: int | None = None,
) -> bool:
    """Return whether this pipeline rank, or its chunk ``vp_stage``, has layers of multi-token prediction.

    They are on the stages that ``layout`` names, or on the last stage. Programs for older releases pass the
    ``TransformerConfig``.
    """
    if isinstance(layout, TransformerConfig):
        config = layout
        layout, mtp_num_layers = config.pipeline_model_parallel_layout, config.mtp_num_layers
    if layout is None:
        return bool(mtp_num_layers) and parallel_state.is_pipeline_last_stage(ignore_virtual, vp_stage)
    chunks = layout.layout[parallel_state.get_pipeline_model_parallel_rank()]
    if not ignore_virtual and len(chunks) > 1:
        if vp_stage is None:
            raise ConfigError(f"mtp_on_this_rank: vp_stage=None with {len(chunks)} chunks; pass the chunk's number")
        chunks = [chunks[vp_stage]]
    return any(LayerType.mtp in chunk for chunk in chunks)


def get_mtp_ranks(pp_ranks: list[int], config: TransformerConfig) -> list[int]:
    """Return the ranks among ``pp_ranks``, the global ranks of a pipeline, with layers of multi-token prediction."""
    layout = config.pipeline_model_parallel_layout
    if not config.mtp_num_layers:
        return []
    if layout is None:
        return [pp_ranks[-1]]
    stages = zip(pp_ranks, layout.layout, strict=True)
    return [rank for rank, chunks in stages if any(LayerType.mtp in chunk for chunk in chunks)]


def roll_tensor(
    tensor: Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
    return_sum: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the next tokens, 0 after the last token of a sequence or document; with ``return_sum`` also their sum.

    Raises ConfigError with context parallelism, where the next token is on another rank, and for other shifts.
    """
    if tensor is None:
        return None, None
    if shifts != -1 or (cp_group is not None and cp_group.size() > 1):
        raise ConfigError(f"roll_tensor: shifts={shifts} or context parallelism is not supported; use whole sequences")
    rolled = torch.roll(tensor, -1, dims)
    borders = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
    ends = torch.tensor([tensor.shape[dims]]) if borders is None else borders[1:]
    rolled.index_fill_(dims, ends.to(rolled.device, torch.int64) - 1, 0)
    return rolled, rolled.sum() if return_sum else None


class MTPLossAutoScaler(MoEAuxLossAutoScaler):
    """The same for losses of multi-token prediction, with a scale of its own: loss scale / number of micro-batches."""

    main_loss_backward_scale: Tensor | None = None


class MTPLossLoggingHelper:
    """Sums of the losses of each depth over the micro-batches, for logging; ``GPTModel`` adds its own.

    ``tracker`` has them under "values", ``[depths]``, and the groups over which they are summed and averaged.
    """

    tracker: ClassVar[dict[str, Any]] = {}

    @classmethod
    def save_loss_to_tracker(
        cls,
        loss: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: Any = None,
        avg_group: Any = None,
    ) -> None:
        """Add the loss of the depth ``layer_number``, from 0; without a number do nothing."""
        if layer_number is None:
            return
        if len(cls.tracker.get("values", ())) != num_layers:
            cls.tracker["values"] = torch.zeros(num_layers, device=loss.device)
        cls.tracker["values"][layer_number] += loss.detach()
        cls.tracker.update(reduce_group=reduce_group, avg_group=avg_group)

    @classmethod
    def clean_loss_in_tracker(cls) -> None:
        """Set the sums to 0."""
        cls.tracker["values"].zero_()
        cls.tracker.update(reduce_group=None, avg_group=None)

    @classmethod
    def reduce_loss_in_tracker(cls) -> None:
        """Sum the values over ``reduce_group``, and average them over ``avg_group``."""
        for name in ("reduce_group", "avg_group"):
            if "values" in cls.tracker and (group := cls.tracker.get(name)) is not None:
                all_reduce_(cls.tracker["values"], group)
                cls.tracker["values"].div_(group.size() if name == "avg_group" else 1)

    @classmethod
    def track_mtp_metrics(
        cls,
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Any] | None = None,
    ) -> None:
        """Reduce the sums, write them times ``loss_scale`` as "mtp_1 loss" and so on, and set them to 0."""
        if "values" not in cls.tracker:
            return
        cls.reduce_loss_in_tracker()
        for depth, loss in enumerate(cls.tracker["values"] * loss_scale):
            name = f"mtp_{depth + 1} loss"
            if total_loss_dict is not None:
                total_loss_dict[name] = total_loss_dict.get(name, 0.0) + loss
            if writer is not None:
                writer.add_scalar(name, loss, iteration)
            if wandb_writer is not None:
                wandb_writer.log({name: loss}, iteration)
        cls.clean_loss_in_tracker()


def process_mtp_loss(
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Callable[..., tuple[Tensor, Any]],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: Any = None,
    tp_group: Any = None,
    packed_seq_params: Any = None,
    scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
    input_ids: Tensor | None = None,
) -> Tensor:
    """Return the first ``[s, b, h]`` of ``hidden_states`` ``[(1 + n) s, b, h]``; the rest adds its losses in backward.

    Part k predicts the labels ``[b, s]`` k tokens later. Its loss is the mean over the counted tokens, times
    ``mtp_loss_scaling_factor`` / n, and with ``calculate_per_token_loss`` times the number of tokens. The default
    labels are the next tokens of ``input_ids``; without both there is no loss.
    """
    # The labels of the first depth.
    main, *later = hidden_states.chunk(1 + config.mtp_num_layers, dim=0)
    mask: Any = loss_mask
    shown: Any = labels
    if shown is None:
        if input_ids is None:
            return main
        mask = torch.ones_like(input_ids) if mask is None else mask
        shown, mask = (
            roll_tensor(x, cp_group=cp_group, packed_seq_params=packed_seq_params)[0] for x in (input_ids, mask)
        )
    # The losses of the depths; labels and mask move by one token for each depth.
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()  # type: ignore[attr-defined]
    mask = torch.ones_like(shown) if mask is None else mask
    tokens = mask.sum() if config.calculate_per_token_loss else 1.0
    for hidden in later:
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        shown, _ = roll_tensor(shown, cp_group=cp_group, packed_seq_params=packed_seq_params)
        mask, counted = roll_tensor(mask, cp_group=cp_group, packed_seq_params=packed_seq_params)
        assert counted is not None, "return_sum is True"
        factor = config.mtp_loss_scaling_factor / len(later) * tokens / counted.clamp(min=1)
        main = MTPLossAutoScaler.apply(main, factor * mask * compute_language_model_loss(shown, logits))
    return main
