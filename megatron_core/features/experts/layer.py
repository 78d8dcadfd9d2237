"""The mixture-of-experts layer, a replacement for the MLP."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.features.experts.balance import Z_LOSS, balancing_names
from megatron_core.features.experts.dispatch import AllGatherDispatcher, AllToAll
from megatron_core.features.experts.experts import Experts
from megatron_core.features.experts.grouped_linear import expert_arithmetic
from megatron_core.features.experts.router import Tokens, TopKRouter
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.parallel.collectives import copy_to_region, reduce_from_region
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.down_projection import DownProjection
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.recompute import recomputed


def moe_loss_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the auxiliary losses added by a mixture-of-experts layer."""
    experts = config.section(MoEConfig)
    return (*balancing_names(experts).values(), *(Z_LOSS,) * experts.router_z_loss)


class MoELayer(nn.Module):
    """y = sum over the chosen experts e of p_e(x) expert_e(x), plus the shared experts' output.

    ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence parallelism). Each rank routes and dispatches
    different tokens: with sequence parallelism its part of the sequence, else a slice for each tensor-parallel rank.
    With ``moe_latent_size`` the routed experts compute y = W_2 sum over e of p_e(x) expert_e(W_1 x).
    Source: Shazeer et al. 2017; Fedus et al. 2021; Dai et al. 2024 for shared experts; names of the projections of
    latents as in Megatron Core's layer of this name.
    """

    auxiliary_loss_names = staticmethod(moe_loss_names)

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__()
        config = context.config.section(MoEConfig)
        assert config.num_experts is not None, "a layer without experts is an MLP"
        self.router = TopKRouter(context, layer_number)
        self.fc1_latent_proj: DownProjection | None
        self.fc2_latent_proj: DownProjection | None
        self.fc1_latent_proj, self.fc2_latent_proj = self._latent_projections(context)
        self.experts = Experts(context)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(context, layer_number)
        dispatcher = AllToAll if config.moe_token_dispatcher_type == "alltoall" else AllGatherDispatcher
        self.dispatcher = dispatcher(context.groups, config.num_experts)
        self.overlaps = config.moe_shared_expert_overlap and self.shared_experts is not None
        self.recompute_shared = config.recomputes("shared_experts")
        self.padded = config.moe_pad_expert_input_to_capacity
        self.token_numbers = expert_arithmetic(context.parallel.arithmetic).token_numbers
        self.tp_group = context.tp_group
        self.sequence_parallel = context.sequence_parallel

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, None]:
        """Return (output, None): experts have no bias to add to the output."""
        shared: list[Tensor] = []

        def share() -> None:
            if self.shared_experts is not None:
                recompute = self.recompute_shared and self.training
                experts = recomputed(self.shared_experts) if recompute else self.shared_experts
                shared.append(experts(hidden.view_as(hidden), context))

        length = hidden.shape[0]
        own_rows = routed_rows(length, self.tp_group) if self._divides else slice(0, length)
        x = hidden.view_as(hidden)  # a node of the graph: its gradient is complete before the shared experts' is added
        if self._divides:
            # Without sequence parallelism all tensor-parallel ranks have all tokens; each routes a slice, so that
            # experts compute them once.
            x = copy_to_region(hidden, self.tp_group)[own_rows]
        meanwhile = share if self.overlaps else None
        tokens = self._tokens(hidden, own_rows, context)
        routing = self.router(x, tokens, context)
        # Texts of a step of generation have no numbers.
        sample_index = None if context.cache is not None else context.sample_index
        numbers = self.token_numbers(tokens.positions, sample_index, self.tp_group.size())
        if self.fc1_latent_proj is not None:
            x = self.fc1_latent_proj(x)
        sent = self.dispatcher.dispatch(
            x.flatten(0, 1), routing, padded=self.padded, meanwhile=meanwhile, numbers=numbers, once=context.once
        )
        if not self.overlaps:
            share()  # here, so that gradients of ``hidden`` are summed in the same order with and without overlap
        output = sent.combine(self.experts(sent.rows, sent.probs, sent.counts, sent.chunks)).view_as(x)
        if self.fc2_latent_proj is not None:
            output = self.fc2_latent_proj(output)
        if self._divides:
            # A sum over ranks of slices in zeros is a gather whose backward is the identity, as the following layers
            # require.
            full = output.new_zeros(hidden.shape)
            full[own_rows] = output
            output = reduce_from_region(full, self.tp_group)
        return (output + shared[0] if shared else output), None

    def _latent_projections(self, context: LayerContext) -> tuple[DownProjection, DownProjection] | tuple[None, None]:
        """The products before dispatch and after combination, each of this rank's tokens."""
        config = context.config
        if config.moe_latent_size is None:
            return None, None
        first = DownProjection(context, config.moe_latent_size, divided=True)
        second = DownProjection(context, config.hidden_size, inputs=config.moe_latent_size, divided=True)
        second.weight.init_method = context.output_layer_init_method
        return first, second

    @property
    def _divides(self) -> bool:
        """Whether the tensor-parallel ranks have the same tokens and must divide them."""
        return self.tp_group.size() > 1 and not self.sequence_parallel

    def _tokens(self, hidden: Tensor, own_rows: slice, context: SequenceContext) -> Tokens:
        length, batch, _ = hidden.shape
        positions = context.residual_positions
        counted = context.token_mask
        if positions is None:
            positions = torch.arange(length, device=hidden.device)
        if counted is None:
            counted = hidden.new_ones(length, batch)
        most = -(-length // self.tp_group.size()) if self._divides else length
        return Tokens(counted[own_rows], positions[own_rows], most)


def routed_rows(length: int, tp_group: Group) -> slice:
    """The positions that a tensor-parallel rank routes, if all ranks of its group have the same ``length`` ones."""
    rank = tp_group.rank()
    size = tp_group.size()
    return slice(length * rank // size, length * (rank + 1) // size)


class SharedExperts(MLP):
    """The shared experts, applied to every token, as one MLP; with a gate, its output times sigmoid(w x).

    ``gate_weight`` ``[1, h]`` is replicated. Source: Dai et al. 2024 (DeepSeekMoE); Qwen2-MoE for the gate.
    """

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        config = context.config
        wide = replace(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size)
        super().__init__(replace(context, config=wide), layer_number)
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            # With sequence parallelism the gradient of each rank covers only its part of the sequence.
            spec = replicated((1, config.hidden_size), context.tp_group.rank(), partial_grad=context.sequence_parallel)
            self.gate_weight = allocate(spec, context.parallel.params_dtype, context.parallel.device)
            self.gate_weight.init_method = context.init_method
            ranks = context.tp_group.size() if context.sequence_parallel else 1
            self.gate_product = context.parallel.arithmetic.token_product(1, ranks)

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:  # type: ignore[override]
        """``[s, b, h]`` -> the same shape."""
        output, _ = super().forward(hidden, context)
        if self.gate_weight is None:
            return output
        return output * self.gate_product(hidden, self.gate_weight, None).sigmoid()
