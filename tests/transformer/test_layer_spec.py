"""Custom layers through ``LayerSpec``, and auxiliary losses, in every layout and schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.errors import LayoutError
from megatron_core.models import GPTModel
from megatron_core.parallel import World
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.transformer import MLP, LayerContext, LayerSpec, SequenceContext, layer_spec
from megatron_core.transformer.layer_spec import auxiliary_loss_names
from megatron_core.transformer.norm import Norm
from megatron_core.verify.bounds import FLOAT64_BOUND, relative_errors
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.trace import RankTrace, Trace, assemble
from tests.parity.rows import BASE, FULL_BLOCK, FULL_UNIFORM, GPIPE, PP2, SP, TP2, V2, ZB_H1, ZB_V, ZERO

COEFFICIENTS = {"per token": 0.3, "per sequence": 0.05}


class GatedMLP(MLP):
    """An MLP with a scalar gate per token, sigmoid(w x), which two auxiliary losses draw to zero."""

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__(context, layer_number)
        self.layer_number, self.sequence_parallel = layer_number, context.sequence_parallel
        spec = replicated((context.config.hidden_size,), context.tp_group.rank(), partial_grad=self.sequence_parallel)
        self.gate = allocate(spec, context.parallel.params_dtype, context.parallel.device)
        self.gate.init_method = context.init_method

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        gate = (hidden @ self.gate).sigmoid()
        squares = gate.to(torch.promote_types(gate.dtype, torch.float32)).square()
        for name, value in {"per token": squares.sum(), "per sequence": squares.mean(0).sum()}.items():
            if name == "per sequence" and self.sequence_parallel:
                value = value / 2  # mean over a half of the sequence: TP2
            hidden = context.add_auxiliary_loss(
                hidden,
                name,
                value,
                layer_number=self.layer_number,
                coefficient=COEFFICIENTS[name],
                per="tokens" if name == "per token" else "sequences",
                partial=self.sequence_parallel,
            )
        return super().forward(hidden * gate.unsqueeze(-1), context)


def gated_layers(config: ModelConfig, layer_number: int) -> LayerSpec:
    """Odd layers have the gate, so that with two stages or chunks both have some, and the last layer has one."""
    spec = layer_spec(config, layer_number)
    return replace(spec, mlp=GatedMLP, auxiliary_losses=tuple(COEFFICIENTS)) if layer_number % 2 else spec


def train(settings: dict) -> tuple[RankTrace, list[dict[str, float]]]:
    """Two steps on ragged batches."""
    run = set_up(RunConfig.from_flat(settings), this_world(), layer_specs=gated_layers)
    run.train_loader = run.loader(RaggedDataset(run.vocab_size, run.config.data.seq_length, None))
    trace, reported = RankTrace(), []
    hooks = StepHooks(before_update=lambda: trace.add_gradients(run.data_parallel, run.state.iteration))
    for _ in range(2):
        result = train_step(run, hooks=hooks)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        reported.append(dict(result.auxiliary_losses))
    run.data_parallel.finish_param_sync()
    trace.add_weights(run.data_parallel, run.stages.values())
    return trace, reported


def trace(world_size: int, settings: dict) -> tuple[Trace, list[dict[str, float]]]:
    """The traces of all ranks combined, and the auxiliary losses, on which all ranks agree."""
    traces, reported = zip(*run_ranks(world_size, train, BASE | settings), strict=True)
    assert all(other == reported[0] for other in reported)
    return assemble(traces), reported[0]


@pytest.fixture(scope="module")
def one_process() -> tuple[Trace, list[dict[str, float]]]:
    return trace(1, {})


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {"micro_batch_size": 4} | FULL_UNIFORM),
        (2, PP2 | GPIPE),
        (2, PP2 | V2),
        (2, PP2 | ZB_H1 | FULL_BLOCK),
        (2, PP2 | ZB_V | {"recompute_granularity": "selective"}),
        (2, TP2),
        (2, TP2 | SP | FULL_UNIFORM),
        (2, ZERO | {"micro_batch_size": 2}),
        (4, PP2 | TP2 | SP),
    ],
    ids=str,
)
def test_auxiliary_losses_and_their_gradients_are_those_of_one_process(
    world_size: int, layout: dict, one_process: tuple[Trace, list[dict[str, float]]]
) -> None:  # C41
    found, reported = trace(world_size, layout)
    assert not found.faults
    assert max(relative_errors(found, one_process[0]).values()) < FLOAT64_BOUND
    for ours, expected in zip(reported, one_process[1], strict=True):
        assert ours == pytest.approx(expected, rel=1e-12)


def test_gradients_are_those_of_the_sum_written_out(
    one_process: tuple[Trace, list[dict[str, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd of the mean token loss + coefficients x means of the auxiliary losses, over the global batch."""
    config = RunConfig.from_flat(BASE)
    run = set_up(config, World(0, 1, local_rank=0, device=torch.device("cpu")))
    batches = run.micro_batches(run.loader(RaggedDataset(run.vocab_size, config.data.seq_length, None)).step(0, 8))
    added: list[Tensor] = []

    def collect(self: SequenceContext, hidden: Tensor, name: str, value: Tensor, **_: object) -> Tensor:
        added.append(COEFFICIENTS[name] * value / (tokens if name == "per token" else 8))
        return hidden

    monkeypatch.setattr(SequenceContext, "add_auxiliary_loss", collect)
    parallel = ModelParallelConfig(params_dtype=torch.float64)
    model = GPTModel(config.model, run.vocab_size, 16, parallel=parallel, layer_specs=gated_layers)
    tokens = sum(batch.loss_mask.sum() for batch in batches)
    for batch in batches:
        losses = model(batch.tokens, labels=batch.labels, sequences=SequenceDetails(sample_index=batch.sample_index))
        added.append((losses * batch.loss_mask).sum() / tokens)
    sum(added).backward()
    for name, parameter in model.named_global_parameters():
        expected = one_process[0].tensors[f"grad0.{name}"]
        found = parameter.grad[: len(expected)].numpy()
        assert abs(found - expected).max() <= FLOAT64_BOUND * abs(expected).max(), name


def test_the_loss_scale_of_float16_changes_nothing() -> None:
    half = {"fp64": False, "fp16": True, "global_batch_size": 2}
    (found, reported), (expected, as_reported) = (trace(1, half | {"loss_scale": scale}) for scale in (2.0**7, 2.0**9))
    assert reported[0] == as_reported[0]
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-4)


def test_a_loss_without_a_collector_is_an_error() -> None:
    model = GPTModel(ModelConfig(), 61, 8, layer_specs=gated_layers)
    tokens, numbers = torch.arange(8)[None], torch.arange(1)
    with pytest.raises(LayoutError, match="layer 1 adds the auxiliary loss 'per token', which would be lost"):
        model(tokens, sequences=SequenceDetails(sample_index=numbers))
    with torch.no_grad():
        assert model(tokens, sequences=SequenceDetails(sample_index=numbers)).shape == (1, 8, 61)


@pytest.mark.parametrize("pattern", [(0, 0, 1), (1, 0, 0), (0, 1, 0)])
def test_losses_of_a_single_layer_are_named(pattern: tuple[int, ...]) -> None:
    config = RunConfig.from_flat(
        {"num_layers": 3, "num_experts": 2, "moe_layer_freq": pattern, "moe_aux_loss_coeff": 0.1}
    ).model
    assert auxiliary_loss_names(config) == ("load_balancing_loss",)
    assert auxiliary_loss_names(replace(config, num_experts=None)) == ()


@pytest.mark.parametrize("plus_one", [False, True])
def test_norms_without_initialization_scale_by_one(plus_one: bool) -> None:
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, apply_layernorm_1p=plus_one)
    model = GPTModel(config, 61, 16, parallel=ModelParallelConfig(perform_initialization=False))
    x = torch.randn(3, 8)
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    assert len(norms) == 3
    for norm in norms:
        assert norm(x).allclose(torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
