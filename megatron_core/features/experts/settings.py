"""Mixture of experts: settings of the router, the experts and how tokens reach them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.setting import ALWAYS, Condition, Resume, given, section, setting, unless

SHARED_EXPERTS = given("moe_shared_expert_intermediate_size", "N")
SOFTMAX_SCORES = Condition(
    "--moe-router-score-function softmax", lambda run: run.model.moe_router_score_function == "softmax"
)
SCORES_OVER_SUM = Condition(
    "--moe-router-score-function sigmoid or sqrtsoftplus, and --moe-router-topk 2 or more",
    lambda run: run.model.moe_router_score_function in ("sigmoid", "sqrtsoftplus") and run.model.moe_router_topk > 1,
)
SPARSEMIXER = Condition(
    "--moe-router-score-function sparsemixer", lambda run: run.model.moe_router_score_function == "sparsemixer"
)
CAPACITY = given("moe_expert_capacity_factor", "X")
AUXILIARY_LOSS = Condition(
    "--moe-router-load-balancing-type seq_aux_loss, aux_loss or global_aux_loss",
    lambda run: run.model.moe_router_load_balancing_type.endswith("aux_loss"),
)
BALANCING_LOSS = Condition(
    "--moe-aux-loss-coeff X",
    lambda run: run.model.moe_aux_loss_coeff or not run.model.moe_router_load_balancing_type.endswith("aux_loss"),
)
QUANTILES = Condition(
    "--moe-router-load-balancing-type quantile_balancing",
    lambda run: run.model.moe_router_load_balancing_type == "quantile_balancing",
)
NO_SINKHORN = unless(
    "--moe-router-load-balancing-type sinkhorn", lambda run: run.model.moe_router_load_balancing_type == "sinkhorn"
)
ROUTED_BY_SCORE = unless("--moe-router-force-load-balancing", lambda run: run.model.moe_router_force_load_balancing)

BalancingLoss = Literal["seq_aux_loss", "aux_loss", "global_aux_loss"]
LoadBalancing = Literal[
    "seq_aux_loss", "aux_loss", "global_aux_loss", "sinkhorn", "seq_sinkhorn", "quantile_balancing", "none"
]


@dataclass(frozen=True, kw_only=True)
@section(needs=c.EXPERTS, resume=Resume.FUNCTION)
class MoEConfig(ModelConfig):
    """Layers whose MLP is a mixture of experts (Shazeer et al. 2017; Fedus et al. 2021)."""

    num_experts: int | None = setting(
        None, r.SMALL_COUNT, when=ALWAYS, resume=Resume.TENSORS, aliases="moe_num_experts"
    )
    """Number of experts of each layer with experts (E); default: all layers have a dense MLP."""
    moe_layer_freq: tuple[int, ...] = setting((1,), resume=Resume.TENSORS)
    """Layers with experts. One number n: layers 0, n, 2n, ... One number per layer: 1 experts, 0 dense; also an
    expression such as [0]*3+[1]*58."""
    moe_ffn_hidden_size: int | None = setting(None, r.SIZE, resume=Resume.SHAPE)
    """Width of each expert; default: --ffn-hidden-size."""
    moe_latent_size: int | None = setting(None, r.SIZE, resume=Resume.TENSORS)
    """Channels of the inputs and outputs of the routed experts: one product projects each token to them before it is
    sent to its experts, and another one their sum back (Nemotron 3). Default: --hidden-size, without projections."""
    moe_shared_expert_intermediate_size: int | None = setting(None, r.SIZE, resume=Resume.SHAPE)
    """Total width of shared experts, which process every token; default: no shared experts."""
    moe_shared_expert_gate: bool = setting(False, needs=SHARED_EXPERTS, resume=Resume.TENSORS)
    """Scale the output of shared experts by a sigmoid of the token (Qwen2-MoE)."""
    moe_shared_expert_overlap: bool = setting(False, when=(c.SEVERAL_EXPERT_RANKS, SHARED_EXPERTS))
    """Compute shared experts while tokens are sent to the other experts."""
    moe_router_topk: int = setting(2, r.COUNT, aliases="moe_top_k topk")
    """Number of experts of each token (k)."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = setting("softmax")
    """Function from logits to scores. With sigmoid and sqrtsoftplus, chosen scores are divided by their sum
    (DeepSeek-V3). sparsemixer: the probability of each choice is its softmax over the experts that are not chosen yet
    and have logits near the largest one (Liu et al. 2024; Phi-3.5-MoE)."""
    moe_sparsemixer_threshold: float = setting(0.01, r.NON_NEGATIVE, needs=SPARSEMIXER)
    """Threshold t of sparsemixer: a logit x is near the largest one, m, if (m - x) / max(|x|, m) <= 2 t."""
    moe_sparsemixer_sampling: bool = setting(
        False,
        needs=SPARSEMIXER,
        when=(c.TRAINING, NO_SINKHORN, ROUTED_BY_SCORE),
        resume=Resume.REPORTED,
    )
    """With sparsemixer, draw each expert in training by its probability, and scale outputs for gradients of third order
    (Heun's method; Liu et al. 2023, arXiv 2310.00811), as Phi-3.5-MoE was trained; default: the largest logits, as in
    evaluation."""
    moe_router_pre_softmax: bool = setting(False, when=(NO_SINKHORN, SOFTMAX_SCORES))
    """Apply softmax to all experts before the choice, without renormalization; default: to the chosen experts after the
    choice."""
    moe_router_num_groups: int | None = setting(None, r.COUNT, when=ROUTED_BY_SCORE)
    """Number of groups of experts for group-limited routing (DeepSeek-V2)."""
    moe_router_group_topk: int | None = setting(None, r.COUNT, when=ROUTED_BY_SCORE)
    """Number of groups from which the experts of a token are chosen."""
    moe_router_group_score_topk: int | None = setting(
        None, r.COUNT, needs=given("moe_router_group_topk", "N"), when=ROUTED_BY_SCORE
    )
    """Number of highest scores of a group whose sum is the group's score: 1 in DeepSeek-V2, 2 in DeepSeek-V3; default:
    --moe-router-topk / --moe-router-group-topk."""
    moe_apply_probs_on_input: bool = setting(False)
    """Multiply the input of an expert by its probability instead of its output (Llama 4); needs --moe-router-topk 1."""
    moe_router_topk_scaling_factor: float | None = setting(None, r.POSITIVE, when=NO_SINKHORN)
    """Factor on the probabilities of the chosen experts."""
    moe_router_sum_epsilon: float = setting(0.0, r.NON_NEGATIVE, needs=SCORES_OVER_SUM)
    """Added to the sum of the chosen scores, by which they are divided (LFM2-MoE: 1e-6)."""
    moe_router_dtype: Literal["fp32", "fp64"] = setting("fp32")
    """Precision of logits, scores and probabilities; at least the precision of activations."""
    moe_router_load_balancing_type: LoadBalancing = setting("seq_aux_loss", when=BALANCING_LOSS)
    """Balancing of the experts' load. seq_aux_loss: an auxiliary loss per sequence, the same in every layout. aux_loss:
    per micro-batch of a rank. global_aux_loss: over all data-parallel ranks and the micro-batches so far. sinkhorn:
    the choice is balanced over the tokens of a rank's micro-batch, in training; it depends on --micro-batch-size, but
    not on tensor and context parallelism (Megatron-LM balances the tokens of each of these ranks). seq_sinkhorn: over
    the tokens of each sequence, the same in every layout. quantile_balancing: a bias of each expert, which after each
    step becomes the one with which the experts would have had equal loads in the step's micro-batches; it depends on
    --micro-batch-size alone. none: no balancing."""
    moe_router_quantile_balancing_ema: float = setting(
        0.0, r.BELOW_1, needs=QUANTILES, resume=Resume.REPORTED, is_refinement=True
    )
    """Share of the previous bias in the new one of quantile_balancing."""
    moe_aux_loss_coeff: float = setting(
        0.0,
        r.NON_NEGATIVE,
        needs=AUXILIARY_LOSS,
        resume=Resume.REPORTED,
        aliases="moe_loss_coeff moe_loss_weight",
        is_refinement=True,
    )
    """Coefficient of the load balancing loss; 0: no loss. Of several values, each is that of the type of
    --moe-router-load-balancing-type at the same place; the further ones are --moe-further-aux-loss-coeffs."""
    moe_further_balancing_types: tuple[BalancingLoss, ...] = setting((), needs=BALANCING_LOSS)
    """Further balancing losses, in addition to --moe-router-load-balancing-type."""
    moe_further_aux_loss_coeffs: tuple[float, ...] = setting(
        (), needs=given("moe_further_balancing_types"), resume=Resume.REPORTED
    )
    """Coefficient of each of --moe-further-balancing-types."""
    moe_z_loss_coeff: float | None = setting(None, r.NON_NEGATIVE, resume=Resume.REPORTED)
    """Coefficient of the mean squared log-sum-exp of the logits (Zoph et al. 2022); default: no loss."""
    moe_router_enable_expert_bias: bool = setting(False, when=ROUTED_BY_SCORE, resume=Resume.TENSORS)
    """Choose experts by score plus a bias. After every step the bias is raised for experts with less than average load
    and lowered for the others (Wang et al. 2024)."""
    moe_router_bias_update_rate: float = setting(
        1e-3, r.NON_NEGATIVE, needs=given("moe_router_enable_expert_bias"), resume=Resume.REPORTED, is_refinement=True
    )
    """Change of the expert bias in a step; 0: the bias is not trained."""
    moe_input_jitter_eps: float | None = setting(None, r.BELOW_1, resume=Resume.REPORTED)
    """Multiply the router's input by U(1 - eps, 1 + eps) in training; default: off."""
    moe_router_force_load_balancing: bool = setting(False, resume=Resume.FREE)
    """Assign tokens to the experts in turn instead of by score; only for benchmarks."""
    moe_expert_capacity_factor: float | None = setting(
        None, r.above_0(2**16), aliases="moe_capacity_factor moe_train_capacity_factor"
    )
    """Maximum tokens of an expert per sequence of S tokens: ceil(S k / E x factor); default: no maximum."""
    moe_capacity_per: Literal["sequence", "micro_batch"] = setting("sequence", needs=CAPACITY)
    """The tokens that share a capacity. sequence: the result is the same in every layout. micro_batch: all sequences
    of a micro-batch, as in Megatron-LM."""
    moe_token_drop_policy: Literal["probs", "position"] = setting("probs", needs=CAPACITY, is_refinement=True)
    """Tokens that an expert beyond its capacity keeps. probs: with the highest probabilities. position: the first
    ones."""
    moe_pad_expert_input_to_capacity: bool = setting(False, needs=CAPACITY, resume=Resume.FREE)
    """Pad the input of each expert to its capacity, so that all messages have the same size."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = setting(
        "alltoall", when=c.SEVERAL_EXPERT_RANKS, resume=Resume.FREE
    )
    """Communication of tokens to the ranks of their experts. alltoall: each token to the ranks of its experts.
    allgather: all tokens to all ranks; simple, for debugging and few ranks."""

    @property
    def group_score_topk(self) -> int | None:
        """Number of scores that make up a group's score; None: the choice of experts is not limited to groups."""
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None or chosen is None or groups == chosen:
            return None
        return self.moe_router_group_score_topk or self.moe_router_topk // chosen

    @property
    def expert_ffn_size(self) -> int:
        """Width of one expert after defaults."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_hidden_size(self) -> int:
        """Channels of the inputs and outputs of the routed experts after defaults."""
        return self.moe_latent_size or self.hidden_size

    def feed_forward_name(self, layer_number: int) -> str | None:
        """The kind of the feed-forward part of a layer (numbered from 0), here "experts" by --moe-layer-freq."""
        name, pattern = super().feed_forward_name(layer_number), self.moe_layer_freq
        if name is None or self.num_experts is None:
            return name
        layer_number = min(layer_number, self.num_layers - 1)
        is_chosen = layer_number % pattern[0] == 0 if len(pattern) == 1 else pattern[layer_number] == 1
        return "experts" if is_chosen else name

    def has_experts(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has experts instead of a dense MLP."""
        return self.num_experts is not None and self.feed_forward_name(layer_number) == "experts"

    @property
    def expert_layers(self) -> list[int]:
        """Ascending numbers of the layers with experts, including the added ones, which are last."""
        return [layer for layer in range(self.num_layers + self.added_layers) if self.has_experts(layer)]

    @property
    def counting_layers(self) -> tuple[Sequence[int], int]:
        """The layers with experts, which count choices of each expert, and dropped ones."""
        return self.expert_layers, (self.num_experts or 0) + 1

    @property
    def balancing_losses(self) -> dict[str, float]:
        """The types of the auxiliary losses that balance the load, and their coefficients."""
        kinds: tuple[str, ...] = (self.moe_router_load_balancing_type, *self.moe_further_balancing_types)
        coefficients = (self.moe_aux_loss_coeff * self.balancing_loss, *self.moe_further_aux_loss_coeffs)
        return {loss: coefficient for loss, coefficient in zip(kinds, coefficients, strict=True) if coefficient}

    @property
    def balancing_loss(self) -> bool:
        """Whether an auxiliary loss balances the load."""
        return self.moe_router_load_balancing_type.endswith("aux_loss") and self.moe_aux_loss_coeff != 0.0

    @property
    def router_z_loss(self) -> bool:
        """Whether an auxiliary loss keeps the router's logits small."""
        return bool(self.moe_z_loss_coeff)
