"""The engine's layers as instances of Megatron Core's classes, and the losses that they add."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_attributes_of_specs
from megatron.core.transformer.layer_context import SampleNumbers, draw_weights, sequence_context
from megatron.core.transformer.module import MegatronModule, mark_keep_in_fp32
from megatron.core.transformer.names import rename
from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.features.experts.part import update_expert_biases
from megatron_core.features.experts.router import TopKRouter
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import Group
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses, MicroBatchAuxiliaryLosses
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext

_UNSUPPORTED = """
    context context_mask key_value_states rotary_pos_cos rotary_pos_sin rotary_pos_cos_sin attention_bias
    inference_context inference_params sequence_len_offset extra_block_kwargs decoder_input output_processor
    output_processor_context tokentype_ids per_token_scale intermediate_tensors mtp_layer_pattern hybrid_submodules
    mamba_submodules
"""
"""Arguments of Megatron's modules that must be None."""


def refuse(user: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``arguments``, the local variables of a method, have unsupported ones that are not None."""
    if wrong := [name for name in arguments if name in _UNSUPPORTED.split() and arguments[name] is not None]:
        raise ConfigError(f"{user}: {', '.join(wrong)} is not supported; remove it")


def check_padding_mask(model: ModelConfig, padding_mask: Tensor | None) -> None:
    """Raise ConfigError for a mask with quantile_balancing, whose biases count every token, as Megatron Core does."""
    if padding_mask is not None and model.section(MoEConfig).moe_router_load_balancing_type == "quantile_balancing":
        raise ConfigError(
            "moe_router_load_balancing_type='quantile_balancing' does not support padding masks; pass padding_mask=None"
        )


class LossCollector(nn.Module):
    """Base class of modules that collect the auxiliary losses and the expert loads of their layers.

    Losses are means over each micro-batch. Loads are summed until ``take_expert_loads``, which is called once a step.
    """

    auxiliary_loss_scale: float | Tensor = 1.0
    """Factor on the gradients of auxiliary losses; the schedule sets it to the scale of the main loss."""
    auxiliary_losses: AuxiliaryLosses | None = None
    """The losses of the last training micro-batch; ``totals`` has their values on this rank."""
    expert_layers: Sequence[int] = ()
    """The numbers of the layers with experts, the same on all stages of a model."""
    _loads: Tensor | None = None
    _latest: AuxiliaryLosses | None = None

    def collect_losses(
        self,
        model: ModelConfig,
        names: tuple[str, ...],
        *,
        sequences: int,
        tokens: Tensor,
        per_token: bool,
        counts: Mapping[str, Tensor] | None = None,
    ) -> MicroBatchAuxiliaryLosses | None:
        """Return a collector for a micro-batch of ``sequences`` with ``tokens`` counted tokens.

        None if layers add no losses, in evaluation and without gradients. With ``per_token`` the caller divides the
        gradients by the number of all tokens, so a loss is weighted by the tokens of its micro-batch.
        """
        experts = model.section(MoEConfig)
        adds = names or (self.expert_layers and experts.moe_router_enable_expert_bias)
        if not adds or not self.training or not torch.is_grad_enabled():
            return None
        self._sum_loads(tokens.device)
        self.auxiliary_losses = self._latest = AuxiliaryLosses(
            names,
            sequences=sequences,
            tokens=tokens.clamp_min(1.0),
            counts=dict(counts or {}),
            loss_scale=self.auxiliary_loss_scale * (tokens if per_token else 1.0),
            counting_layers=(self.expert_layers, (experts.num_experts or 0) + 1),
        )
        return self.auxiliary_losses.of_micro_batch(0)

    def _sum_loads(self, device: torch.device) -> None:
        """Add the load of the last micro-batch, whose forward has ended, to the sum."""
        if self._latest is not None and self.expert_layers:
            load = self._latest.expert_load(device)[:, :-1]
            self._loads = load if self._loads is None else self._loads + load
        self._latest = None

    def take_expert_loads(self, num_experts: int, device: torch.device) -> Tensor:
        """Return how often each expert was chosen on this rank since the last call: ``[layers, experts]`` float64."""
        self._sum_loads(device)
        taken, self._loads = self._loads, None
        empty = torch.zeros(len(self.expert_layers), num_experts, dtype=torch.float64, device=device)
        return empty if taken is None else taken


def update_expert_biases_of(modules: Iterable[nn.Module], group: Group) -> None:
    """Update the expert biases of modules in training from the loads since the last call, summed over ``group``.

    bias_e += rate sign(mean load - load_e) (Wang et al. 2024, algorithm 1).
    """
    done = set[nn.Module]()
    for module in modules:
        if not isinstance(module, LossCollector) or not module.training:
            continue
        routers = [each for each in module.modules() if isinstance(each, TopKRouter) and each.expert_bias is not None]
        if routers and done.isdisjoint(routers):
            done.update(routers)
            bias: Any = routers[0].expert_bias
            loads = module.take_expert_loads(bias.numel(), bias.device)
            all_reduce_(loads, group)
            update_expert_biases([module], dict(zip(module.expert_layers, loads.tolist(), strict=True)))


class ExportedModule(LossCollector, MegatronModule):
    """Base of classes with Megatron Core's arguments over one of the engine's, ``stands_for``.

    ``forward`` takes Megatron's arguments, or the engine's, with which a built model calls it.
    """

    stands_for: ClassVar[type[nn.Module]]
    _context: LayerContext | None = None
    _samples: SampleNumbers

    def bind(self, config: Any, context: LayerContext, samples: SampleNumbers) -> None:
        """Store the objects that calls with Megatron's arguments need."""
        self.config, self._context, self._samples = config, context, samples

    @property
    def context(self) -> LayerContext:
        """The context from which the module was built."""
        assert self._context is not None, "adopt has bound it"
        return self._context

    def sequence(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> SequenceContext:
        """Return the engine's context of ``hidden`` ``[s, b, h]``, with the next numbers of sequences."""
        check_padding_mask(self.context.config, padding_mask)
        length, batch = hidden.shape[:2]
        samples = self._samples.take(batch, hidden.device) if self.training else None
        if isinstance(rotary_pos_emb, tuple | list):
            rotary_pos_emb = _common_angles(*rotary_pos_emb)
        documents = None
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            split = self.context.split
            whole = length * split.cp_size * (split.tp_size if split.sequence_parallel else 1)
            lengths = packed_seq_params.document_lengths(batch, whole)
            documents, attention_mask = PackedDocuments.of(lengths, batch, whole, hidden.device), None
        return sequence_context(
            self.context, hidden, attention_mask, rotary_pos_emb, samples, padding_mask, documents=documents
        )

    def with_losses(
        self, names: tuple[str, ...], hidden: Tensor, passed: SequenceContext, per_token: bool | None = None
    ) -> SequenceContext:
        """Return ``passed`` with a collector of the losses ``names`` of a module that is called alone."""
        layers, mask, batch = self.context, passed.token_mask, hidden.shape[1]
        count = hidden.shape[0] * batch if mask is None else mask.sum(dtype=torch.float64)
        tokens = torch.as_tensor(count, dtype=torch.float64, device=hidden.device)
        for group in (layers.cp.whole, *[layers.tp_group] * layers.sequence_parallel):
            all_reduce_(tokens, group)
        per_token = self.config.calculate_per_token_loss if per_token is None else per_token
        collector = self.collect_losses(layers.config, names, sequences=batch, tokens=tokens, per_token=per_token)
        return replace(passed, auxiliary_losses=collector)


def _common_angles(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Return the angles of queries and keys. ConfigError for others, such as a pair of local and global angles."""
    if queries is not keys and (queries is None or keys is None or not torch.equal(queries, keys)):
        raise ConfigError(
            "rotary_pos_emb has two different tensors; pass the same angles for queries and keys (pretrain_gpt.py has "
            "--rotary-base-of-windows for layers with a window)"
        )
    return queries


def adopt(
    root: nn.Module,
    classes: Iterable[type[ExportedModule]],
    config: Any,
    context: LayerContext,
    prefix: str | None,
    samples: SampleNumbers | None = None,
) -> None:
    """Make the modules in ``root`` instances of ``classes`` with Megatron's names; weights and results do not change.

    Weights are drawn under the names ``prefix + name``, unless it is None. ``Float16Module`` keeps expert biases in
    float32. Later changes of ``config`` reach the modules, see ``ChangingConfig``.
    """
    config.add_model(root, context.config)
    exported = {each.stands_for: each for each in classes}
    samples = samples or SampleNumbers(current())
    for module in root.modules():
        if type(module) in exported:
            module.__class__ = exported[type(module)]
        if isinstance(module, ExportedModule) and module._context is None:
            module.bind(config, context, samples)
        for bias in (module.expert_bias, module.qb_beta) if isinstance(module, TopKRouter) else ():
            if bias is not None:
                mark_keep_in_fp32(bias)
    if prefix is not None:
        draw_weights(root, context.seed, prefix)
    rename(root)  # the draws depend on the engine's names
    set_attributes_of_specs(root)
