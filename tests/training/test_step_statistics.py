"""Norms of gradients and weights, whole and by layer, zeros in the gradient, losses by source, and a weight decay that
changes, in any layout."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from megatron_core.optimizer.clip import part_names
from megatron_core.training.step import load_batches, train_step
from megatron_core.verify.ranks import run_ranks
from tests.datasets.files import write
from tests.defects.plant import planted
from tests.runs import tiny_run

LOGGED = {
    "log_params_norm": True, "log_num_zeros_in_grad": True, "log_norms_by_layer": True, "fp64": True, "swiglu": True,
    "ffn_hidden_size": 48,
    # Embeddings of tokens that do not occur have gradient 0 in any precision.
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_layer_freq": (0, 1)}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "dp2 zero1": {"use_distributed_optimizer": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
    "ep2": EXPERTS | {"expert_model_parallel_size": 2},
}


def _statistics(settings: dict) -> tuple[float, float, dict[str, float]]:
    result = train_step(tiny_run(**LOGGED | settings))
    squares, zeros, *_ = result.statistics
    return squares, zeros, dict(result.breakdown)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(layout: str) -> None:  # C13 C14 C15
    settings = LAYOUTS[layout]
    squares, zeros, parts = _statistics(EXPERTS if layout == "ep2" else {})
    assert sum(v**2 for name, v in parts.items() if name.startswith("params")) == pytest.approx(squares, rel=1e-12)
    for found in run_ranks(2, _statistics, settings):
        assert found[:2] == (pytest.approx(squares, rel=1e-12), pytest.approx(zeros, abs=4))
        assert found[2] == {name: pytest.approx(value, rel=1e-9) for name, value in parts.items()}


SQUARES = "optimizer.clip:GradientNorm.squares_by_part"


@pytest.mark.parametrize(
    ("layout", "target", "old", "new"),
    [
        ("tp2", SQUARES, "for first, end in owned]", "for first, end in [(0, 10**9)]]"),
        ("dp2 zero1", SQUARES, "(max(first, offset), min(end, offset + stop - start))", "(max(first, offset), end)"),
        ("pp2", SQUARES, "part_of(name, num_layers)", "part_of(name.split('layers.')[-1], num_layers)"),
        ("pp2", "parallel.sharding:ShardSpec.parts", "not self.is_copy and all", "all"),
        (
            *("dp2 zero1", "training.step:StepStatistics.own"),
            *(
                "self._norm.squares_by_part(self._layers)",
                "(self._norm.squares_by_part(self._layers) * (self._norm.group.rank() == 0))",
            ),
        ),
    ],
    ids=["copies count", "a piece ends with its bucket", "layers are the head's", "a tied weight twice", "one rank's"],
)
def test_norms_by_layer_that_leave_out_a_share_or_count_it_twice_are_found(
    layout: str, target: str, old: str, new: str
) -> None:
    tied = {"untie_embeddings_and_output_weights": "is_copy" not in old}
    _, _, parts = _statistics(tied)
    with planted(target, old, new):
        found = [each[2] for each in run_ranks(2, _statistics, LAYOUTS[layout] | tied)]
    assert all(each.keys() == parts.keys() for each in found)
    assert any(each[name] != pytest.approx(value, rel=1e-9) for each in found for name, value in parts.items())


def test_one_process_against_its_weights_and_gradients() -> None:
    run = tiny_run(**LOGGED, clip_grad=10.0)  # no clipping, which may scale the stored gradients
    rows = run.vocab_size
    named = {
        name: p[:rows] if "word_embeddings" in name or "output_layer" in name else p
        for name, p in run.stages[0].named_global_parameters()
    }
    squares = {name: float(p.detach().square().sum()) for name, p in named.items()}
    result = train_step(run)
    assert result.statistics[0] == pytest.approx(sum(squares.values()), rel=1e-12)
    seen = torch.unique(torch.cat([batch["tokens"] for batch in run.train_loader.step(0, 4)]))
    zeros = result.statistics[1]
    assert zeros == pytest.approx((rows - len(seen)) * run.config.model.hidden_size, abs=4) and zeros > 4

    grads = {name: float(p.main_grad.square().sum()) for name, p in run.stages[0].named_global_parameters()}
    starts = {"embedding": "embedding.", "layer 0": "decoder.layers.0.", "layer 1": "decoder.layers.1."}
    expected: dict[str, float] = defaultdict(float)
    for name in named:
        part = next((part for part, start in starts.items() if name.startswith(start)), "head")
        expected[f"grad-norm by layer/{part}"] += grads[name]
        expected[f"params-norm by layer/{part}"] += squares[name]
    assert len(expected) == 2 * len(part_names(2)) == len(result.breakdown)
    assert result.breakdown == {name: pytest.approx(value**0.5, rel=1e-12) for name, value in expected.items()}
    norms = [value for name, value in result.breakdown.items() if name.startswith("grad")]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(result.grad_norm, rel=1e-12)


END = 60


def _blend(folder: Path) -> dict:
    """Three files with different texts, one of which ends in documents whose ends are masked."""
    generator = torch.Generator().manual_seed(0)
    words = []
    for number, name in enumerate(("books", "code", "web")):
        documents = torch.randint(20 * number, 20 * number + 20, (12, 50), generator=generator)
        if name == "web":
            documents[:, -1] = END
        words += [str(number + 1), write(folder / name, documents.tolist())]
    tokens = {"tokenizer_type": "NullTokenizer", "vocab_size": END + 1, "eod_mask_loss": True}
    return {"mock_data": False, "data_path": tuple(words), "split": "100,0,0", "fp64": True} | tokens


def _by_source(settings: dict, steps: int = 2) -> list[dict[str, float]]:
    run = tiny_run(**settings)
    return [dict(train_step(run).breakdown) for _ in range(steps)]


SPLIT = {
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def test_losses_by_source_in_any_layout(tmp_path: Path) -> None:  # C3
    blend = _blend(tmp_path)
    whole = _by_source(blend)
    assert {name for step in whole for name in step} == {f"lm loss by source/{n}" for n in ("books", "code", "web")}
    for layout, settings in SPLIT.items():
        for found in run_ranks(2, _by_source, blend | settings):
            expected = [{name: pytest.approx(loss, rel=1e-9) for name, loss in step.items()} for step in whole]
            assert found == expected, layout


ADD = "training.step:StepStatistics.add_losses"


@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("tp2 sp", "not None and self._owns_loss", "not None and self._norm.group.rank() < 0"),
        ("cp2", "not None and self._owns_loss", "not None and self._norm.group.rank() == 0"),
        ("dp2", "batch.source, values", "batch.source[:1].expand(len(values)), values"),
        ("cp2", "batch.loss_mask), strict", "torch.ones_like(batch.loss_mask)), strict"),
    ],
    ids=["no rank counts", "one rank counts", "a micro-batch has one source", "all tokens count"],
)
def test_losses_by_source_that_leave_out_a_share_or_count_it_twice_are_found(
    layout: str, old: str, new: str, tmp_path: Path
) -> None:
    blend = _blend(tmp_path)
    (whole,) = _by_source(blend, 1)
    with planted(ADD, old, new):
        (found,) = run_ranks(2, _by_source, blend | SPLIT[layout], 1)[0]
    assert found != {name: pytest.approx(loss, rel=1e-9) for name, loss in whole.items()}


@pytest.mark.parametrize("settings", [{}, {"data_order": "megatron"}, {"dataloader_type": "cyclic"}])
def test_losses_by_source_are_those_of_the_samples(settings: dict, tmp_path: Path) -> None:
    """Each text has its own words, so that the first token identifies its source."""
    run = tiny_run(**_blend(tmp_path), **settings)
    expected: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        for batch in load_batches(run, run.step_after(0)):
            losses = run.stages[0](batch.tokens, batch.position_ids, labels=batch.labels, sequences=batch)
            for row, tokens in zip(losses, batch.tokens, strict=True):
                name = ("books", "code", "web")[min(int(tokens[0]) // 20, 2)]
                expected[f"lm loss by source/{name}"] += row[tokens != END].tolist()
    found = train_step(run).breakdown
    assert found == {name: pytest.approx(sum(each) / len(each), rel=1e-12) for name, each in expected.items()}
    assert len(found) > 1 and "lm loss by source/web" in found


def _weights_after(steps: int, **settings: object) -> torch.Tensor:
    run = tiny_run(lr_decay_style="constant", **settings)
    for _ in range(steps):
        train_step(run)
    return torch.cat([p.detach().flatten() for p in run.stages[0].parameters()])


def test_weight_decay_of_each_step_is_the_schedules() -> None:
    """Over 8 steps from 0 to 0.8 the first one has 0.1, and the second one more."""
    growing = {"start_weight_decay": 0.0, "end_weight_decay": 0.8, "weight_decay_incr_style": "linear"}
    constant = {"weight_decay": 0.1}
    torch.testing.assert_close(_weights_after(1, **growing), _weights_after(1, **constant), rtol=1e-7, atol=0)
    assert (_weights_after(2, **growing) - _weights_after(2, **constant)).abs().max() > 1e-6
