"""The router: choice of experts for each token, with losses and statistics for load balancing."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.features.experts import choice
from megatron_core.features.experts.balance import Z_LOSS, Total, balancing_loss, balancing_names, count_choices, z_loss
from megatron_core.features.experts.quantile import BalancingBiases, quantile_choice
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.ops.reference import uniform
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import all_gather_flat_
from megatron_core.parallel.initialization import name_seed
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.transformer.context import LayerContext, SequenceContext


@dataclass(frozen=True)
class Routing:
    """The experts of the tokens of a rank; T tokens, k choices per token."""

    experts: Tensor
    """``[T, k]`` int64, global indices of experts."""
    probs: Tensor
    """``[T, k]``, the factor on each expert's output, in float32 or wider."""
    kept: Tensor | None = None
    """``[T, k]`` bool, False for choices dropped because of capacity; None: no capacity limit."""
    capacity: int | None = None
    """Maximum number of rows of one rank for an expert, if limited."""


@dataclass(frozen=True)
class Tokens:
    """Mask and positions of this rank's tokens, ``n`` positions of ``b`` sequences."""

    counted: Tensor
    """``[n, b]``, 1 for tokens that count in losses and statistics, else 0."""
    positions: Tensor
    """``[n]`` int64, positions in the whole sequence."""
    most: int
    """The largest ``n`` over the ranks with parts of the same sequences."""


class TopKRouter(nn.Module):
    """logits = W x, or W x + b if linear layers have biases; ``choice.choose_experts`` selects the k experts of each
    token; then compute their probabilities.

    ``x`` is ``[n, b, h]``. ``weight`` ``[E, h]`` is replicated; because each rank routes different tokens, its gradient
    is partial over the tensor-parallel ranks. Logits and later values have the dtype ``moe_router_dtype`` or wider.
    ``expert_bias`` ``[E]`` and, with quantile_balancing, ``qb_beta`` ``[E]``, float32, have no gradient;
    ``update_expert_biases`` updates them.
    """

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__()
        config = context.config.section(MoEConfig)
        parallel = context.parallel
        tp_rank = context.tp_group.rank()
        assert config.num_experts is not None, "a layer without experts has no router"
        self.config = config
        self.layer_number = layer_number
        self.applications = config.applications(layer_number)
        self.sequence_group = context.groups.group("tp-cp")
        self.batch_group = context.groups.group("tp-dp-cp")
        shape = (config.num_experts, config.hidden_size)
        spec_of = partial(replicated, index=tp_rank, partial_grad=True)
        self.weight = allocate(spec_of(shape), parallel.params_dtype, parallel.device)
        self.weight.init_method = context.init_method
        self.bias = None
        if config.add_bias_linear:
            self.bias = allocate(spec_of(shape[:1]), parallel.params_dtype, parallel.device)
            self.bias.init_method = context.init_method
        self.expert_bias = None
        if config.moe_router_enable_expert_bias:
            self.expert_bias = allocate(replicated(shape[:1], tp_rank), torch.float32, parallel.device)
            self.expert_bias.init_method = nn.init.zeros_
            self.expert_bias.requires_grad_(False)
        self.qb_beta = None
        if config.moe_router_load_balancing_type == "quantile_balancing":
            self.qb_beta = allocate(replicated(shape[:1], tp_rank), torch.float32, parallel.device)
            self.qb_beta.init_method = nn.init.zeros_
            self.qb_beta.requires_grad_(False)
            self.balancing_biases = BalancingBiases(config.num_experts, parallel.device)
        arithmetic = parallel.arithmetic
        self.product = arithmetic.token_product(shape[0], context.tp_group.size())
        self.totals: tuple[Total, Total] = (arithmetic.sequence_sum, arithmetic.loss_sum)
        """Sums over tokens of losses per sequence and per token."""
        self.jitter_key = name_seed(context.seed, f"jitter:layers.{layer_number}.router")
        self.sampling_key = name_seed(context.seed, f"sampling:layers.{layer_number}.router")

    def forward(self, x: Tensor, tokens: Tokens, context: SequenceContext) -> Routing:
        """``x`` ``[n, b, h]`` -> the routing of the T = n b tokens, ordered by position."""
        # Near ties decide between experts: in 16 bits different layouts would choose differently (Fedus et al. 2021,
        # section 2.4).
        dtype = torch.float64 if self.config.moe_router_dtype == "fp64" else wide(x.dtype)
        x = self._jittered(x.to(dtype), tokens, context)
        logits = self.product(x, self.weight, self.bias)
        drawn = self._drawn(logits, tokens, context)
        # The choice has no gradient; the probabilities of the chosen experts have one.
        experts = self._choose(logits.detach(), tokens, drawn)
        if context.router_replay is not None:
            experts = context.router_replay.experts(self.layer_number + context.repeat, experts)
        by_sinkhorn = self.config.moe_router_load_balancing_type.endswith("sinkhorn")
        choose_by = partial(choice.probabilities, drawn=None if drawn is None else drawn[..., -1])
        probs = (choice.sinkhorn_probabilities if by_sinkhorn else choose_by)(logits, experts, self.config)
        within, capacity = self._capacity(experts, probs, tokens)
        # Not in a forward pass without gradients, which has no collector.
        if self.training and torch.is_grad_enabled():
            probs = self._add_losses(probs, logits, tokens, context)
        if self.training and context.auxiliary_losses is not None:
            context.auxiliary_losses.add_load(self.layer_number + context.repeat, self._load(experts, within, tokens))
        flat = None if within is None else within.flatten(0, 1)
        return Routing(experts.flatten(0, 1), probs.flatten(0, 1), flat, capacity)

    def _jittered(self, x: Tensor, tokens: Tokens, context: SequenceContext) -> Tensor:
        """In training, multiply ``x`` by U(1 - eps, 1 + eps), a function of sample, position and channel."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return x
        assert context.sample_index is not None, "jitter is a function of the samples' numbers"
        drawn = uniform(tuple(x.shape), self.jitter_key, context.sample_index, tokens.positions)
        return x * (1 + eps * (2 * drawn.to(x.dtype) - 1))

    def _drawn(self, logits: Tensor, tokens: Tokens, context: SequenceContext) -> Tensor | None:
        """Samples of U(0, 1) for sparsemixer's choices in training, ``[n, b, k, E + 1]``; None: no choice is drawn.

        They are functions of sample and position. Those of experts have 32 bits, the last one of a choice 16.
        """
        if not self.config.moe_sparsemixer_sampling or not self.training:
            return None
        assert context.sample_index is not None, "choices are a function of the samples' numbers"
        (n, b, experts) = logits.shape
        k = self.config.moe_router_topk
        shape = (n, b, k * (2 * experts + 1))
        drawn = uniform(shape, self.sampling_key, context.sample_index, tokens.positions).to(torch.float64)
        high, low, gate = drawn.unflatten(-1, (k, -1)).split([experts, experts, 1], dim=-1)
        return torch.cat([high + (low - 0.5) / 2**16, gate], dim=-1)

    def _choose(self, logits: Tensor, tokens: Tokens, drawn: Tensor | None = None) -> Tensor:
        """Return the experts of each token, ``[n, b, k]``."""
        config = self.config
        if config.moe_router_force_load_balancing:
            first = tokens.positions[:, None, None] * config.moe_router_topk
            in_turn = first + torch.arange(config.moe_router_topk, device=logits.device)
            return (in_turn % logits.shape[-1]).expand(*logits.shape[:2], -1)
        if config.moe_router_load_balancing_type.endswith("sinkhorn") and self.training:
            return self._sinkhorn_choice(logits, tokens)
        if self.qb_beta is not None:
            return self._quantile_choice(logits, tokens, self.qb_beta)
        if drawn is not None:
            return choice.draw_sparsemixer(logits, drawn[..., :-1], config.moe_sparsemixer_threshold)
        return choice.choose_experts(logits, self.expert_bias, config)

    def _quantile_choice(self, logits: Tensor, tokens: Tokens, bias: Tensor) -> Tensor:
        """Choose by logits and bias, and keep the biases that would balance the whole micro-batch in training."""
        sequences, local_tokens = self._whole_sequences(logits, tokens)
        k = self.config.moe_router_topk
        experts, balanced = quantile_choice(sequences.flatten(0, 1), bias.to(logits.dtype), k)
        if self.training and torch.is_grad_enabled():
            self.balancing_biases.add(balanced)
        return experts.view(*sequences.shape[:2], k)[local_tokens]

    def _sinkhorn_choice(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Balance whole sequences in any layout: each separately (seq_sinkhorn), or the micro-batch together."""
        sequences, local_tokens = self._whole_sequences(logits, tokens)
        by_sequence = self.config.moe_router_load_balancing_type == "seq_sinkhorn"
        groups = sequences.split(1 if by_sequence else sequences.shape[1], dim=1)
        balanced = torch.cat([choice.sinkhorn(group.flatten(0, 1)).view(group.shape) for group in groups], dim=1)
        return balanced.topk(self.config.moe_router_topk).indices[local_tokens]

    def _capacity(self, experts: Tensor, probs: Tensor, tokens: Tokens) -> tuple[Tensor | None, int | None]:
        """Return which choices are kept, and the maximum number of this rank's rows for an expert."""
        factor = self.config.moe_expert_capacity_factor
        (_, batch, k) = experts.shape
        if factor is None:
            return None, None
        sequences, local = self._whole_sequences(torch.cat([experts.to(probs.dtype), probs.detach()], dim=-1), tokens)
        shape = sequences.shape
        sharing = 1
        if self.config.moe_capacity_per == "micro_batch":
            sharing = batch
            # In Megatron Core's order: the first tokens of all sequences, then the second ones, and so on.
            sequences = sequences.reshape(-1, 1, shape[-1])
        num_experts = self.config.num_experts or 1
        capacity = math.ceil(sequences.shape[0] * k / num_experts * factor)
        policy = self.config.moe_token_drop_policy
        within = choice.within_capacity(sequences[..., :k].long(), sequences[..., k:], num_experts, capacity, policy)
        within = within.view(*shape[:2], k)
        return within[local], batch // sharing * min(capacity, tokens.most * sharing)

    def _whole_sequences(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Gather ``[n, b, ...]`` of whole sequences by position; return it and the indices of this rank's tokens."""
        group = self.sequence_group
        n = x.shape[0]
        rows = torch.cat([tokens.positions[:, None].to(x.dtype), x.flatten(1)], dim=-1)
        local_rows = x.new_full((tokens.most, rows.shape[1]), torch.inf)  # the position inf sorts padding to the end
        local_rows[:n] = rows
        full = local_rows
        length = n
        if group.size() > 1:
            full = x.new_empty(group.size() * local_rows.shape[0], local_rows.shape[1])
            all_gather_flat_(full.view(-1), local_rows.view(-1), group)
            length = int(full[:, 0].isfinite().sum())  # waits for the device
        order = full[:, 0].argsort(stable=True)[:length]
        full = full[order]
        local_tokens = torch.searchsorted(full[:, 0].contiguous(), tokens.positions.to(x.dtype))
        return full[:, 1:].unflatten(1, x.shape[1:]), local_tokens

    def _add_losses(self, probs: Tensor, logits: Tensor, tokens: Tokens, context: SequenceContext) -> Tensor:
        """Return ``probs``, unchanged, with the gradients of the auxiliary losses attached.

        The balancing losses of a layer that is applied several times are averaged, as in Megatron Core.
        """
        config = self.config
        counted = tokens.counted.to(logits.dtype)
        number = self.layer_number + context.repeat
        for loss_type, name in balancing_names(config).items():
            per_token = loss_type == "global_aux_loss"
            value = balancing_loss(
                *(logits, counted, config, loss_type, self.sequence_group, self.batch_group, context, number),
                total=self.totals[per_token],
            )
            probs = context.add_auxiliary_loss(
                probs,
                name,
                value,
                layer_number=self.layer_number,
                coefficient=config.balancing_losses[loss_type] / len(self.applications),
                per="tokens" if per_token else "sequences",
                partial=True,
            )
        if config.moe_z_loss_coeff:
            probs = context.add_auxiliary_loss(
                probs,
                Z_LOSS,
                z_loss(logits, counted, self.totals[1]),
                layer_number=self.layer_number,
                coefficient=config.moe_z_loss_coeff,
                partial=True,
            )
        return probs

    @torch.no_grad()
    def _load(self, experts: Tensor, within: Tensor | None, tokens: Tokens) -> Tensor:
        """Return the number of choices of each expert, then of dropped choices: float64 ``[E + 1]``."""
        counted = tokens.counted.to(torch.float64)
        counts = count_choices(experts, counted, self.config.num_experts or 1).sum(0)
        dropped = counted.new_zeros(1) if within is None else (~within * counted.unsqueeze(-1)).sum().view(1)
        return torch.cat([counts, dropped])


Router = TopKRouter
"""Megatron's name for the base class of routers; here an alias of the only router."""
