"""Megatron's functions for a step give the losses and gradients of one backward over the whole batch in one process."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

MICRO, BATCH, LENGTH, VOCABULARY = 3, 2, 8, 40


def _batches(ragged: bool) -> list[Tensor]:
    """Micro-batches ``[b, s + 1]``, each with a different length if ``ragged``."""
    generator = torch.Generator().manual_seed(5)
    lengths = [LENGTH - 2 * micro * ragged for micro in range(MICRO)]
    return [torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator) for length in lengths]


def _model(chunk: int, chunks: int, ragged: bool) -> GPTModel:
    """Chunk ``chunk`` of this pipeline rank."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        variable_seq_lengths=ragged,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage() and chunk == 0,
        post_process=parallel_state.is_pipeline_last_stage() and chunk == chunks - 1,
        vp_stage=chunk if chunks > 1 else None,
    )


def _forward_step(iterator, model: GPTModel):
    batch = next(iterator)
    output = model(batch[:, :-1], labels=batch[:, 1:] if model.post_process else None)

    def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, float]]:
        return losses.mean(), {"loss": losses.mean().item()}

    return output, loss_func


def _run_step(chunks: int, forward_only: bool, ragged: bool) -> tuple[list[dict], dict[str, np.ndarray]]:
    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(1, size, chunks if chunks > 1 else None)
    models = [_model(chunk, chunks, ragged) for chunk in range(chunks)]
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(_batches(ragged)) for _ in models],
        model=models,
        num_microbatches=MICRO,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    trained = [(n, p) for model in models for n, p in model.named_parameters() if p.grad is not None]
    return reports, {name: parameter.grad.numpy() for name, parameter in trained}


def _one_process(ragged: bool = False) -> tuple[list[float], dict[str, np.ndarray]]:
    parallel_state.destroy_model_parallel()
    model = _model(0, 1, ragged)
    losses = [model(batch[:, :-1], labels=batch[:, 1:]).mean() for batch in _batches(ragged)]
    (sum(losses) / MICRO).backward()
    return [loss.item() for loss in losses], {n: p.grad.numpy() for n, p in model.named_parameters()}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("size", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_step_equals_one_backward(size: int, chunks: int, ragged: bool) -> None:  # C40
    losses, gradients = _one_process(ragged)
    results = run_ranks(size, _run_step, chunks, False, ragged)
    assert [report["loss"] for report in results[-1][0]] == pytest.approx(losses, rel=1e-12)
    assert all(reports == [] for reports, _ in results[:-1])
    found = {name: grad for _, grads in results for name, grad in grads.items()}
    assert found.keys() == gradients.keys()
    for name, grad in found.items():
        np.testing.assert_allclose(grad, gradients[name], rtol=1e-10, atol=1e-14, err_msg=name)


def test_forward_only_leaves_no_gradient() -> None:
    losses, _ = _one_process()
    results = run_ranks(2, _run_step, 1, True, False)
    assert [report["loss"] for report in results[-1][0]] == pytest.approx(losses, rel=1e-12)
    assert all(grads == {} for _, grads in results)


class _Chain(torch.nn.Module):
    """A model of one stage with Megatron's hooks on its config."""

    def __init__(self, **hooks: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.config = type(
            "Hooks", (), {"hidden_size": 1} | {k: staticmethod(v) if callable(v) else v for k, v in hooks.items()}
        )

    def set_input_tensor(self, tensor: Tensor | None) -> None:
        assert tensor is None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _with_tokens(iterator, model: _Chain):
    x = next(iterator)
    return model(x), lambda out: (out.sum(), torch.tensor(x.numel()), {"tokens": x.numel()})


def _step(model: _Chain) -> list[dict]:
    return get_forward_backward_func()(
        forward_step_func=_with_tokens,
        data_iterator=iter([torch.full((3,), 2.0), torch.full((5,), 4.0)]),
        model=model,
        num_microbatches=2,
        seq_length=1,
        micro_batch_size=1,
    )


def test_token_sums_and_hooks() -> None:
    seen: list[object] = []

    @contextmanager
    def no_sync():
        seen.append("suspended")
        yield
        seen.append("resumed")

    def finalize(models: list, tokens: Tensor | None) -> None:
        seen.append(None if tokens is None else int(tokens))

    per_token = _Chain(calculate_per_token_loss=True, finalize_model_grads_func=finalize, no_sync_func=no_sync)
    assert _step(per_token) == [{"tokens": 3}, {"tokens": 5}]
    assert per_token.weight.grad.item() == 3 * 2.0 + 5 * 4.0
    assert seen == ["suspended", "resumed", 8]

    averaged = _Chain(grad_scale_func=lambda loss: loss * 10)
    _step(averaged)
    assert averaged.weight.grad.item() == pytest.approx(10 * (2.0 + 4.0) / 2)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="pp_size=3"):
        get_forward_backward_func(pp_size=3)
    with pytest.raises(ConfigError, match="1 data iterators for 2 model chunks"):
        get_forward_backward_func()(
            forward_step_func=_with_tokens,
            data_iterator=iter([]),
            model=[_Chain(), _Chain()],
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )
