"""Router, losses, capacity and grouped products against written-out formulas, with planted defects.

Errors common to all layouts are not detected by parity rows. Each check is a function that must fail with a planted
defect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Lfm2MoeConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer as their_sparsemixer

from megatron_core.config import ModelConfig
from megatron_core.errors import LayoutError
from megatron_core.features.experts.balance import balancing_loss, z_loss
from megatron_core.features.experts.choice import (
    choose_experts,
    draw_sparsemixer,
    probabilities,
    sinkhorn,
    within_capacity,
)
from megatron_core.features.experts.dispatch import AllGatherDispatcher, AllToAll
from megatron_core.features.experts.grouped import grouped_product, is_grouped
from megatron_core.features.experts.grouped_linear import grouped_linear
from megatron_core.features.experts.layer import MoELayer, moe_loss_names
from megatron_core.features.experts.part import update_expert_biases
from megatron_core.features.experts.router import Routing, Tokens
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses
from tests.defects.plant import planted

N, B, E, K, H = 7, 3, 8, 2, 8
BASE = ModelConfig(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=2,
    num_experts=E,
    moe_router_topk=K,
    moe_ffn_hidden_size=4,
    swiglu=True,
    disable_bias_linear=True,
    init_method_std=0.5,
)
ONE = LocalGroup()


def _logits() -> Tensor:
    return torch.randn(N, B, E, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2


def _layer(**settings: object) -> MoELayer:
    torch.manual_seed(1)
    config = replace(BASE, **settings)
    layer = MoELayer(LayerContext(config, ModelParallelConfig(params_dtype=torch.float64), ONE, 1), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def check_softmax() -> None:
    """Softmax over the chosen ones; or over all, without normalisation."""
    logits = _logits()
    experts = choose_experts(logits, None, BASE)
    whole = logits.softmax(-1)
    best = whole.topk(K)
    torch.testing.assert_close(experts, best.indices)
    torch.testing.assert_close(probabilities(logits, experts, BASE), best.values / best.values.sum(-1, keepdim=True))
    pre = replace(BASE, moe_router_pre_softmax=True, moe_router_topk_scaling_factor=3.0)
    torch.testing.assert_close(probabilities(logits, experts, pre), 3 * best.values)


def check_sigmoid_and_bias() -> None:
    """The bias affects the choice but not the probability; scores below any epsilon keep their ratios."""
    sigmoid, logits = replace(BASE, moe_router_score_function="sigmoid"), _logits()
    bias = torch.linspace(-1, 1, E)
    experts = choose_experts(logits, bias, sigmoid)
    torch.testing.assert_close(experts, (logits.sigmoid() + bias).topk(K).indices)
    chosen = logits.sigmoid().gather(-1, experts)
    torch.testing.assert_close(probabilities(logits, experts, sigmoid), chosen / chosen.sum(-1, keepdim=True))
    tiny = probabilities(logits - 100, experts, sigmoid)
    torch.testing.assert_close(tiny.sum(-1), torch.ones(N, B, dtype=torch.float64))
    one = replace(sigmoid, moe_router_topk=1)
    torch.testing.assert_close(probabilities(logits, experts[..., :1], one), chosen[..., :1])
    root = replace(one, moe_router_score_function="sqrtsoftplus")
    expected = functional.softplus(logits).sqrt().gather(-1, experts[..., :1])
    torch.testing.assert_close(probabilities(logits, experts[..., :1], root), expected)


def check_groups() -> None:
    """Experts come only from the best groups, also if the bias makes all scores negative."""
    limited = replace(
        BASE,
        moe_router_score_function="sigmoid",
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    )
    scores = _logits().sigmoid() - 2.0
    experts = choose_experts(_logits(), torch.full((E,), -2.0), limited)
    groups = scores.unflatten(-1, (4, 2)).sum(-1).topk(2).indices
    for n in range(N):
        for b in range(B):
            assert set((experts[n, b] // 2).tolist()) == set(groups[n, b].tolist())


def check_groups_by_their_best() -> None:
    """DeepSeek-V2: experts come only from the groups with the best experts, also if their number is odd."""
    limited = replace(
        BASE,
        moe_router_pre_softmax=True,
        moe_router_topk=3,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_group_score_topk=1,
    )
    scores = _logits().softmax(-1)
    groups = scores.unflatten(-1, (4, 2)).amax(-1).topk(2).indices
    allowed = torch.zeros(N, B, 4, dtype=torch.bool).scatter_(-1, groups, True).repeat_interleave(2, -1)
    expected = scores.masked_fill(~allowed, 0.0).topk(3)
    experts = choose_experts(_logits(), None, limited)
    torch.testing.assert_close(experts, expected.indices)
    torch.testing.assert_close(probabilities(_logits(), experts, limited), expected.values)


def check_sum_epsilon() -> None:
    """LFM2-MoE: choices and probabilities are those of transformers, also of scores as small as the epsilon."""
    theirs = Lfm2MoeTopKRouter(Lfm2MoeConfig(num_experts=E, num_experts_per_tok=K, hidden_size=E)).double()
    theirs.weight.data = torch.eye(E, dtype=torch.float64)
    config = replace(BASE, moe_router_score_function="sigmoid", moe_router_sum_epsilon=1e-6)
    for shift in (0.0, -14.0):
        logits, bias = _logits().flatten(0, 1) + shift, torch.linspace(0.2, -0.2, E, dtype=torch.float64)
        _, expected, chosen = theirs(logits, bias)
        experts = choose_experts(logits, bias, config)
        torch.testing.assert_close(experts, chosen)
        torch.testing.assert_close(probabilities(logits, experts, config), expected, rtol=1e-12, atol=0)


def check_sparsemixer() -> None:
    """Phi-3.5-MoE: choices, probabilities and gradients are those of transformers, for several thresholds."""
    for threshold in (0.01, 0.3, 0.8):
        config = replace(BASE, moe_router_score_function="sparsemixer", moe_sparsemixer_threshold=threshold)
        ours, theirs = (_logits().requires_grad_() for _ in range(2))
        experts = choose_experts(ours, None, config)
        found = probabilities(ours, experts, config)
        expected, chosen = their_sparsemixer(theirs, jitter_eps=threshold, training=False)
        torch.testing.assert_close(experts, chosen)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert ours.grad is not None and bool(ours.grad.abs().sum() > 1)
    factored = replace(config, moe_router_topk_scaling_factor=2.5)
    torch.testing.assert_close(probabilities(ours, experts, factored), 2.5 * found)


def check_drawn_sparsemixer() -> None:
    """Phi-3.5-MoE in training: with the same samples, choices and gradients are those of transformers."""
    threshold = 0.8
    config = replace(BASE, moe_router_score_function="sparsemixer", moe_sparsemixer_threshold=threshold)
    ours, theirs = (_logits().requires_grad_() for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(N, B, 2, ours.shape[-1] + 1, generator=generator, dtype=torch.float64)
    noise, last = drawn[..., :-1], drawn[..., -1]
    exponentials, uniforms = (iter(x.unbind(2)) for x in (-noise.log(), last[..., None]))
    with (
        patch.object(torch.Tensor, "exponential_", lambda _: next(exponentials).clone()),
        patch.object(torch.Tensor, "uniform_", lambda x: x),
        patch.object(torch, "rand_like", lambda _: next(uniforms)),
    ):
        expected, chosen = their_sparsemixer(theirs, jitter_eps=threshold, training=True)
    experts = draw_sparsemixer(ours, noise, threshold)
    found = probabilities(ours, experts, config, drawn=last)
    torch.testing.assert_close(experts, chosen)
    # transformers rounds the factor 0.3333 to float32, whatever the dtype of the logits.
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-12)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    likeliest = probabilities(ours, experts, config)
    assert 0 < (found < likeliest / 2).sum() < found.numel() / 2, "some outputs are scaled"
    assert not torch.equal(experts, choose_experts(ours, None, config))


def check_softmax_and_bias() -> None:
    """ERNIE 4.5: the bias is added to the probabilities of all experts; those of the chosen ones are normalised."""
    logits, bias = _logits(), torch.linspace(-0.3, 0.3, E)
    experts = choose_experts(logits, bias, BASE)
    torch.testing.assert_close(experts, (logits.softmax(-1) + bias).topk(K).indices)
    chosen = logits.softmax(-1).gather(-1, experts)
    torch.testing.assert_close(probabilities(logits, experts, BASE), chosen / chosen.sum(-1, keepdim=True))


def check_sinkhorn() -> None:
    """All rows have the same sum, and so do all columns."""
    balanced = sinkhorn(_logits()[:, 0] + 50)
    torch.testing.assert_close(balanced.sum(0), torch.full((E,), 1 / E, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(balanced.sum(1), torch.full((N,), 1 / N, dtype=torch.float64), rtol=1e-3, atol=0)


MEGATRONS_CHOICE = (
    *([[6, 7], [2, 5], [1, 7]], [[2, 1], [0, 4], [5, 4]], [[7, 6], [4, 5], [3, 1]], [[3, 6], [0, 7], [6, 5]]),
    *([[5, 2], [7, 1], [7, 3]], [[1, 2], [0, 1], [0, 1]], [[5, 4], [4, 5], [1, 2]]),
)
"""The k largest of megatron-core 0.20's ``sinkhorn`` of ``_logits()`` of the whole micro-batch, ``[n, b, k]``."""


def check_sinkhorn_of_a_micro_batch() -> None:
    """All tokens of a micro-batch are balanced together, and with ``seq_sinkhorn`` those of each sequence."""
    tokens = Tokens(torch.ones(N, B), torch.arange(N), N)
    chosen = {}
    for kind in ("sinkhorn", "seq_sinkhorn"):
        router = _layer(moe_router_load_balancing_type=kind).router
        torch.nn.init.eye_(router.weight)
        chosen[kind] = router(_logits(), tokens, SequenceContext()).experts.view(N, B, K)
    assert chosen["sinkhorn"].tolist() == list(MEGATRONS_CHOICE)
    alone = torch.stack([sinkhorn(_logits()[:, b]).topk(K).indices for b in range(B)], dim=1)
    assert torch.equal(chosen["seq_sinkhorn"], alone) and not torch.equal(alone, chosen["sinkhorn"])


def check_balancing_loss() -> None:
    """Term by term, with padding; the counts are those without bias and groups, and have no gradient."""
    logits, counted = _logits().requires_grad_(), torch.ones(N, B, dtype=torch.float64)
    counted[4:, 1], counted[:, 2] = 0, 0
    config = replace(BASE, moe_aux_loss_coeff=1.0)
    found = balancing_loss(logits, counted, config, "seq_aux_loss", ONE, ONE, SequenceContext(), 0)
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        tokens = [n for n in range(N) if counted[n, b]]
        for e in range(E):
            share = sum(logits[n, b].softmax(-1)[e] for n in tokens)
            chosen = sum(e in logits[n, b].topk(K).indices for n in tokens)
            expected = expected + E / (K * max(len(tokens), 1) ** 2) * share * chosen
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3 and not gradients[0][counted == 0].any()
    nearly_even = torch.zeros(E, 1, E).double() + torch.eye(E)[:, None] * 1e-9
    one = replace(config, moe_router_topk=1)
    even = balancing_loss(nearly_even, torch.ones(E, 1).double(), one, "seq_aux_loss", ONE, ONE, SequenceContext(), 0)
    torch.testing.assert_close(even, torch.ones((), dtype=torch.float64))  # the minimum


def check_z_loss() -> None:
    """Padding adds nothing."""
    logits, counted = _logits(), (torch.arange(N * B).view(N, B) % 3 > 0).double()
    expected = sum(
        math.log(sum(math.exp(x) for x in row)) ** 2
        for row, mask in zip(logits.flatten(0, 1).tolist(), counted.flatten().tolist(), strict=True)
        if mask
    )
    assert z_loss(logits, counted).item() == pytest.approx(expected)


def check_capacity() -> None:
    """Each expert keeps its most probable tokens of each sequence, or the first ones."""
    logits = _logits()
    experts = choose_experts(logits, None, BASE)
    probs = probabilities(logits, experts, BASE)
    for policy in ("probs", "position"):
        kept = within_capacity(experts, probs, E, 2, policy)
        for b in range(B):
            for e in range(E):
                slots = [(n, k) for n in range(N) for k in range(K) if experts[n, b, k] == e]
                if policy == "probs":
                    slots.sort(key=lambda slot: -probs[slot[0], b, slot[1]])
                assert [bool(kept[n, b, k]) for n, k in slots] == [i < 2 for i in range(len(slots))]


def check_layer() -> None:
    """A layer is the weighted sum of its experts' MLPs with any dispatcher; dropped choices contribute nothing."""
    settings = {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True}
    x = torch.randn(N, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for own in ({}, {"moe_expert_capacity_factor": 0.5}, {"moe_token_dispatcher_type": "allgather"},
                {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}):  # fmt: skip
        layer = _layer(**settings, **own)
        output, bias = layer(x, SequenceContext())
        assert bias is None
        experts, shared = layer.experts, layer.shared_experts
        logits = functional.linear(x, layer.router.weight)
        chosen = choose_experts(logits, None, BASE)
        probs = probabilities(logits, chosen, BASE)
        kept = torch.ones_like(probs) if len(own) == 0 or "moe_token_dispatcher_type" in own else within_capacity(
            chosen, probs, E, math.ceil(N * K / E * 0.5), "probs").double()  # fmt: skip
        expected = _mlp(x, shared.linear_fc1.weight, shared.linear_fc2.weight)
        expected = expected * functional.linear(x, shared.gate_weight).sigmoid()
        for k in range(K):
            for e in range(E):
                own_output = _mlp(x, experts.linear_fc1.weight[e], experts.linear_fc2.weight[e])
                expected = expected + own_output * ((chosen[..., k] == e) * probs[..., k] * kept[..., k])[..., None]
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def _mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, value = functional.linear(x, first).chunk(2, -1)
    return functional.linear(functional.silu(gate) * value, second)


def check_bias_update() -> None:
    """Up for experts below the mean, down for those above."""
    layer = _layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    with torch.no_grad():
        layer.router.expert_bias.zero_()
    update_expert_biases([layer], {0: [10, 2, 6, 6, 6, 6, 6, 6]})
    expected = torch.tensor([-1e-3, 1e-3] + [0.0] * 6)
    torch.testing.assert_close(layer.router.expert_bias.detach(), expected)


def check_auxiliary_gradients() -> None:
    """Coefficients times 0 and times 1 give routers different gradients, of the reported losses."""
    gradients = []
    for factor in (0.0, 1.0):
        layer = _layer(moe_aux_loss_coeff=0.5 * factor, moe_z_loss_coeff=0.1 * factor)
        x = torch.randn(N, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        losses = AuxiliaryLosses(
            ("load_balancing_loss", "z_loss"), B, torch.tensor(float(N * B)), counting_layers=([0], E + 1)
        )
        output, _ = layer(x, SequenceContext(auxiliary_losses=losses.of_micro_batch(0)))
        output.sum().backward()
        gradients.append(layer.router.weight.grad)
        load = losses.expert_load(torch.device("cpu"))
        assert load[0, :-1].sum() == N * B * K
    weight = layer.router.weight.detach().requires_grad_()
    logits, counted = functional.linear(x, weight), torch.ones(N, B, dtype=torch.float64)
    config = replace(BASE, moe_aux_loss_coeff=0.5)
    balance = balancing_loss(logits, counted, config, "seq_aux_loss", ONE, ONE, SequenceContext(), 0) / B
    z = z_loss(logits, counted) / (N * B)
    (0.5 * balance + 0.1 * z).backward()
    torch.testing.assert_close(gradients[1] - gradients[0], weight.grad)
    assert weight.grad.abs().max() > 1e-3
    means = losses.means(losses.totals(torch.device("cpu"), owns_loss=False).tolist())
    assert list(means.values()) == pytest.approx([balance.item(), z.item()])


def check_probabilities_on_inputs() -> None:
    """y = W_2 f(W_1 (p x)), forward and gradients of the router and of the input."""
    settings = {"moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True}
    layer = _layer(**settings)
    x = torch.randn(N, B, H, dtype=torch.float64, requires_grad=True)
    output, _ = layer(x, SequenceContext())
    router = layer.router.weight.detach().requires_grad_()
    again = x.detach().requires_grad_()
    logits = functional.linear(again, router)
    chosen, experts = logits.argmax(-1), layer.experts
    expected = torch.zeros_like(again)
    for e in range(E):
        scaled = again * logits[..., e : e + 1].sigmoid()
        own = _mlp(scaled, experts.linear_fc1.weight[e].detach(), experts.linear_fc2.weight[e].detach())
        expected = expected + own * (chosen == e).unsqueeze(-1)
    torch.testing.assert_close(output, expected)
    seed = torch.randn_like(output)
    for found, wanted in zip(
        torch.autograd.grad(output, (x, layer.router.weight), seed),
        torch.autograd.grad(expected, (again, router), seed),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def check_two_balancing_losses() -> None:
    """The gradient of the router is the sum of the gradients of both losses, each with its coefficient."""
    gradients = {}
    two = {"moe_further_balancing_types": ("aux_loss",), "moe_further_aux_loss_coeffs": (0.3,)}
    for name, settings in {
        "none": {},
        "first": {"moe_aux_loss_coeff": 0.5},
        "second": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "aux_loss"},
        "both": {"moe_aux_loss_coeff": 0.5, **two},
    }.items():
        layer = _layer(**settings)
        x = torch.randn(N, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        losses = AuxiliaryLosses(
            moe_loss_names(layer.router.config), B, torch.tensor(float(N * B)), counting_layers=([0], E + 1)
        )
        layer(x, SequenceContext(auxiliary_losses=losses.of_micro_batch(0)))[0].sum().backward()
        gradients[name] = layer.router.weight.grad
    assert losses.names == ("load_balancing_loss", "aux_loss")
    torch.testing.assert_close(
        gradients["both"] - gradients["none"],
        gradients["first"] - gradients["none"] + gradients["second"] - gradients["none"],
    )
    assert (gradients["second"] - gradients["first"]).abs().max() > 1e-4


def check_losses_are_not_lost() -> None:
    """A coefficient whose loss would not be collected is an error, for any kind of loss."""
    x = torch.randn(N, B, H, dtype=torch.float64)
    for kind in ("seq_aux_loss", "global_aux_loss"):
        layer = _layer(moe_aux_loss_coeff=0.5, moe_router_load_balancing_type=kind)
        with pytest.raises(LayoutError, match="would be lost"):
            layer(x, SequenceContext())
        with torch.no_grad():
            layer(x, SequenceContext())


def check_masked_choices_have_no_gradient() -> None:
    """C51: experts that were not chosen, or were dropped, send no gradient to the router."""
    x = torch.randn(4, H, dtype=torch.float64)
    experts, kept = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 1]]), torch.ones(4, 2, dtype=torch.bool)
    kept[1, 0] = kept[3, 1] = False
    for kind in (AllToAll, AllGatherDispatcher):
        probs = torch.rand(4, 2, dtype=torch.float64).requires_grad_()
        given = kind(ParallelGroups.single(), E).dispatch(x, Routing(experts, probs, kept))
        given.combine(given.rows * given.probs[:, None]).sum().backward()
        torch.testing.assert_close(probs.grad, x.sum(-1, keepdim=True) * kept)


def check_grouped_product() -> None:
    """One product for all experts is bitwise equal to the loop, with empty groups, in forward and backward."""
    counts = [5, 0, 3, 4]
    for dtype, inner in ((torch.float32, 16), (torch.bfloat16, 16), (torch.float32, 6), (torch.float64, 16)):
        x, weight = torch.randn(12, inner).to(dtype), torch.randn(4, 8, inner).to(dtype)
        expected = [row @ weight[e].t() for e, row in enumerate(x.split(counts))]
        assert is_grouped(x, weight.shape[1:]) == (dtype != torch.float64 and inner == 16)
        assert torch.equal(grouped_product(x, weight.transpose(1, 2), counts), torch.cat(expected))
        mine, matrix = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
        seen, theirs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        grouped_linear(mine, matrix, counts).square().sum().backward()
        torch.cat([row @ theirs[e].t() for e, row in enumerate(seen.split(counts))]).square().sum().backward()
        torch.testing.assert_close((mine.grad, matrix.grad), (seen.grad, theirs.grad))
        assert not matrix.grad[1].any()
    nothing = grouped_linear(
        torch.zeros(0, 16).requires_grad_(), matrix := torch.nn.Parameter(torch.ones(4, 8, 16)), [0] * 4
    )
    nothing.sum().backward()
    assert not matrix.grad.any()


CHECKS = [function for name, function in list(globals().items()) if name.startswith("check_")]
LAYER, ROUTER = "features.experts.layer:MoELayer", "features.experts.router:TopKRouter"
CHOICE, BALANCE = "features.experts.choice", "features.experts.balance"
# name: the check that must fail, the function, its fragment, the defect
DEFECTS: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "groups are masked with zeros": (
        check_groups,
        f"{CHOICE}:choose_experts",
        "~eligible[..., None], -inf",
        "~eligible[..., None], 0.0",
    ),
    "a group's score is that of k / group_topk experts, also if it is given": (
        check_groups_by_their_best,
        f"{CHOICE}:choose_experts",
        "grouped.topk(counted)",
        "grouped.topk(max(1, k // group_topk) + 1)",
    ),
    "the bias of a softmax is added to the logits": (
        check_softmax_and_bias,
        f"{CHOICE}:choose_experts",
        "if config.moe_router_pre_softmax or bias is not None else",
        "if config.moe_router_pre_softmax else",
    ),
    "the bias does not count in the choice": (
        check_sigmoid_and_bias,
        f"{CHOICE}:choose_experts",
        "ranking + bias",
        "ranking",
    ),
    "scores are divided by their sum over all experts": (
        check_sigmoid_and_bias,
        f"{CHOICE}:probabilities",
        "scores.gather(-1, experts).softmax(-1)",
        "scores.softmax(-1).gather(-1, experts)",
    ),
    "the epsilon of the sum of scores is forgotten": (
        check_sum_epsilon,
        f"{CHOICE}:probabilities",
        "total / (total + epsilon)",
        "total / total",
    ),
    "tiny scores drown in an epsilon": (
        check_sigmoid_and_bias,
        f"{CHOICE}:probabilities",
        "scores.gather(-1, experts).softmax(-1)",
        "(lambda s: s / (s.sum(-1, keepdim=True) + 1e-20))(scores.exp().gather(-1, experts))",
    ),
    "the scaling factor is forgotten": (check_softmax, f"{CHOICE}:probabilities", "chosen * factor", "chosen"),
    "logits have been through a softmax": (
        check_balancing_loss,
        f"{CHOICE}:log_scores",
        "return logits",
        "return logits.softmax(-1)",
    ),
    "columns are not scaled": (
        check_sinkhorn,
        f"{CHOICE}:sinkhorn",
        "rows[:, None] * cost * columns",
        "rows[:, None] * cost",
    ),
    "sinkhorn balances each sequence alone": (
        check_sinkhorn_of_a_micro_batch,
        "features.experts.router:TopKRouter._sinkhorn_choice",
        'self.config.moe_router_load_balancing_type == "seq_sinkhorn"',
        "True",
    ),
    "experts keep their least probable tokens": (
        check_capacity,
        f"{CHOICE}:within_capacity",
        "descending=True",
        "descending=False",
    ),
    "padding counts in the balancing loss": (
        check_balancing_loss,
        f"{BALANCE}:balancing_loss",
        "(scores * counts).sum(-1) * counted",
        "(scores * counts).sum(-1)",
    ),
    "padding counts as load": (
        check_balancing_loss,
        f"{BALANCE}:count_choices",
        "counted.unsqueeze(-1)",
        "torch.ones_like(counted).unsqueeze(-1)",
    ),
    "padding counts in the z-loss": (check_z_loss, f"{BALANCE}:z_loss", " * counted", ""),
    "the balancing loss is a constant": (
        check_balancing_loss,
        f"{BALANCE}:balancing_loss",
        "(scores * counts).sum(-1) * counted",
        "(scores * counts).sum(-1).detach() * counted",
    ),
    "the balancing loss is k times too large": (
        check_balancing_loss,
        f"{BALANCE}:balancing_loss",
        "return experts / k * total(terms / tokens.square())",
        "return experts * total(terms / tokens.square())",
    ),
    "the gradient of auxiliary losses is thrown away": (
        check_auxiliary_gradients,
        "transformer.auxiliary_loss:_AttachGradient.backward",
        "return grad, ctx.gradient, None",
        "return grad, None, None",
    ),
    "probabilities are applied to outputs": (
        check_probabilities_on_inputs,
        "features.experts.experts:Experts.forward",
        "if self.probs_on_input:",
        "if False:",
    ),
    "the second balancing loss has the coefficient of the first": (
        check_two_balancing_losses,
        f"{ROUTER}._add_losses",
        "coefficient=config.balancing_losses[loss_type]",
        "coefficient=config.moe_aux_loss_coeff",
    ),
    "sparsemixer compares with the largest of all logits": (
        check_sparsemixer,
        f"{CHOICE}:_near",
        "largest = left.amax(-1, keepdim=True)",
        "largest = logits.amax(-1, keepdim=True)",
    ),
    "sparsemixer divides by the largest logit alone": (
        check_sparsemixer,
        f"{CHOICE}:_near",
        "torch.maximum(logits.abs(), largest)",
        "largest.abs()",
    ),
    "drawn experts have the gradients of their scaled outputs": (
        check_drawn_sparsemixer,
        f"{CHOICE}:sparsemixer_probabilities",
        "share + share.detach().masked_fill(unscaled, 0.0) * (SCALE - 1)",
        "share * torch.where(unscaled, 1.0, SCALE)",
    ),
    "the likeliest expert is scaled, too": (
        check_drawn_sparsemixer,
        f"{CHOICE}:sparsemixer_probabilities",
        "(chosen == shares.argmax(-1, keepdim=True)) |",
        "",
    ),
    "an expert is drawn twice": (
        check_drawn_sparsemixer,
        f"{CHOICE}:draw_sparsemixer",
        "left.scatter(-1, chosen, -inf)",
        "left",
    ),
    "sparsemixer counts a chosen expert again": (
        check_sparsemixer,
        f"{CHOICE}:sparsemixer_probabilities",
        "left.scatter(-1, chosen, -inf)",
        "left",
    ),
    "the bias drives load to where it is": (
        check_bias_update,
        "features.experts.part:update_expert_biases",
        "load.mean() - load",
        "load - load.mean()",
    ),
    "dropped choices are computed all the same": (
        check_layer,
        f"{ROUTER}._capacity",
        "return within[local]",
        "return torch.ones_like(within[local])",
    ),
    "probabilities have no gradient": (
        check_masked_choices_have_no_gradient,
        "features.experts.dispatch:AllToAll.dispatch",
        "routing.probs.flatten()",
        "routing.probs.detach().flatten().requires_grad_()",
    ),
    "the last choice of a token is forgotten": (
        check_layer,
        "features.experts.dispatch:_plain_total",
        "slots.sum(1)",
        "slots[:, :1].sum(1)",
    ),
    "an expert begins at the end of the one before the last": (
        check_grouped_product,
        "features.experts.grouped:runs",
        "start += count",
        "start += count - (count == 3)",
    ),
    "shared experts skip their gate": (
        check_layer,
        "features.experts.layer:SharedExperts.forward",
        "if self.gate_weight is None:",
        "if True:",
    ),
}


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_formula(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_caught(name: str, record_property: Callable[[str, object], None]) -> None:
    check, target, old, new = DEFECTS[name]
    with planted(target, old, new), pytest.raises((AssertionError, RuntimeError)):
        check()
