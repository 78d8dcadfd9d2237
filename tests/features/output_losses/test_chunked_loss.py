"""The fused output layer and loss against separate layer and loss, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_core.errors import LayoutError
from megatron_core.features.output_losses.chunked_loss import linear_cross_entropy
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.tensor_parallel.linear_comm import LinearComm
from megatron_core.verify.ranks import run_ranks

S, B, WIDTH, PADDED, VOCABULARY = 6, 3, 8, 24, 19
TOKENS = S * B
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _target() -> Tensor:
    return torch.randint(0, VOCABULARY, (B, S), generator=torch.Generator().manual_seed(1)).t()


def _weight(group: Group, *, main_grad: bool) -> nn.Parameter:
    """This rank's rows; its main gradient, if there is one, is not zero."""
    weight = nn.Parameter(_random(PADDED, WIDTH, seed=2).chunk(group.size())[group.rank()].clone())
    if main_grad:
        weight.main_grad = torch.ones_like(weight)
    return weight


def _results(group: Group, *, fused: int | None, sequence: bool, main_grad: bool, smoothing: float) -> list[Tensor]:
    """Losses, gradient of hidden and of the weight; ``fused`` is the number of tokens at a time, None: not fused."""
    comm = LinearComm(group, gather_sequence=sequence, reduce_input_grad=not sequence)
    hidden = _random(S, B, WIDTH, seed=3)
    hidden = (hidden.chunk(group.size())[group.rank()] if sequence else hidden).clone().requires_grad_()
    weight, target = _weight(group, main_grad=main_grad), _target()
    if fused is None:
        logits = parallel_linear(hidden, weight, None, comm)
        losses = vocab_parallel_cross_entropy(logits, target, smoothing, group, vocab_size=VOCABULARY)
    else:
        losses = linear_cross_entropy(
            hidden,
            weight,
            target,
            comm,
            label_smoothing=smoothing,
            vocab_size=VOCABULARY,
            max_logit_bytes=fused * len(weight) * weight.element_size(),
        )
    losses.backward(_random(B, S, seed=4).t())
    assert (weight.grad is None) == main_grad
    return [losses, hidden.grad, weight.main_grad if main_grad else weight.grad]


def _check(group: Group) -> None:
    for sequence in (False, True):
        for main_grad in (False, True):
            for smoothing in (0.0, 0.1):
                options = {"sequence": sequence, "main_grad": main_grad, "smoothing": smoothing}
                expected = _results(group, fused=None, **options)
                for tokens in (1, 5, TOKENS, 1000):
                    for mine, right in zip(_results(group, fused=tokens, **options), expected, strict=True):
                        torch.testing.assert_close(mine, right, **EXACT)


def _check_on_all() -> None:
    _check(dist.group.WORLD)


def test_on_one_rank() -> None:  # C55
    _check(LocalGroup())


def test_on_two_ranks() -> None:  # C20 C21
    run_ranks(2, _check_on_all)


class _Sizes(TorchDispatchMode):
    """Records sizes of tensors with a column per token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape[-1:] == (PADDED,) and out.shape != (WIDTH, PADDED):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
def test_no_more_logits_than_allowed_are_there_at_once(tokens: int, backend: str) -> None:
    hidden, weight = _random(S, B, WIDTH, seed=3).requires_grad_(), _weight(LocalGroup(), main_grad=True)
    with _Sizes() as sizes:
        losses = linear_cross_entropy(hidden, weight, _target(), max_logit_bytes=8 * PADDED * tokens, backend=backend)
        losses.sum().backward()
    assert 0 < sizes.largest <= tokens * PADDED


def test_what_needs_no_gradient_gets_none() -> None:
    hidden, weight = _random(S, B, WIDTH, seed=3), _weight(LocalGroup(), main_grad=False)
    linear_cross_entropy(hidden, weight, _target()).sum().backward()
    of_weight = weight.grad
    assert of_weight.abs().sum() > 0
    weight.grad = None
    weight.requires_grad_(False)
    hidden.requires_grad_()
    linear_cross_entropy(hidden, weight, _target()).sum().backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, _target()).grad_fn is None


def test_a_second_backward_gives_the_same() -> None:
    hidden, weight = _random(S, B, WIDTH, seed=3).requires_grad_(), _weight(LocalGroup(), main_grad=False)
    losses = linear_cross_entropy(hidden, weight, _target(), max_logit_bytes=8 * PADDED * 4)
    first, second = (torch.autograd.grad(losses.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_weights_that_changed_before_backward_are_noticed() -> None:
    weight = _weight(LocalGroup(), main_grad=False)
    losses = linear_cross_entropy(_random(S, B, WIDTH, seed=3), weight, _target())
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    """Losses are float32, gradients have the dtype of their tensor, the main gradient its own."""
    hidden = _random(S, B, WIDTH, seed=3).to(dtype).requires_grad_()
    weight = nn.Parameter(_weight(LocalGroup(), main_grad=False).detach().to(dtype))
    weight.main_grad = torch.zeros(weight.shape)
    losses = linear_cross_entropy(hidden, weight, _target(), max_logit_bytes=16 * PADDED)
    losses.sum().backward()
    assert losses.dtype == torch.float32 and hidden.grad.dtype == dtype
    assert weight.main_grad.abs().sum() > 0


def test_targets_of_another_shape_are_refused() -> None:
    hidden, weight = _random(S, B, WIDTH, seed=3), _weight(LocalGroup(), main_grad=False)
    with pytest.raises(LayoutError, match=r"hidden \[6, 3, 8\] and target \[3, 6\] do not match"):
        linear_cross_entropy(hidden, weight, _target().t())
