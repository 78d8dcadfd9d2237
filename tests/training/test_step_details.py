"""Properties of a step that are equal on both sides of the parity matrix, which therefore cannot test them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.buffer import all_gather_flat_
from megatron_core.datasets.loader import Batch
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.training.setup import Run
from megatron_core.training.step import evaluate, train_step
from megatron_core.transformer import SequenceContext, TransformerLayer
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run


def _weights(run: Run) -> list[np.ndarray]:
    run.data_parallel.finish_param_sync()
    return [p.detach().numpy().copy() for stage in run.stages.values() for p in stage.parameters()]


class _Late:
    """A gather that happens only in ``wait``: earlier reads get last step's values."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def wait(self) -> None:
        all_gather_flat_(self.bucket.weights, self.bucket.weight_shard, self.bucket.dp_group)


def _steps_with_late_gathers(settings: dict) -> tuple[list[float], list[np.ndarray]]:
    def start_late(bucket: Bucket) -> None:
        bucket.gathering = _Late(bucket)

    run = tiny_run(use_distributed_optimizer=True, **settings)
    if settings.get("overlap_param_gather"):
        Bucket.start_gather = start_late
    losses = [train_step(run).loss for _ in range(3)]
    return losses, _weights(run)


@pytest.mark.parametrize(
    "layout", [{"ddp_bucket_size": 500}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}]
)
def test_no_module_reads_weights_that_have_not_come_yet(layout: dict) -> None:  # C59
    world = 4 if layout.get("tensor_model_parallel_size") else 2
    at_once = run_ranks(world, _steps_with_late_gathers, layout)
    late = run_ranks(world, _steps_with_late_gathers, layout | {"overlap_param_gather": True})
    for (losses, weights), (late_losses, late_weights) in zip(at_once, late, strict=True):
        assert late_losses == losses
        for expected, found in zip(weights, late_weights, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_adam_sees_gradients_without_the_loss_scale() -> None:  # C37
    plain, scaled = tiny_run(clip_grad=0.0), tiny_run(clip_grad=0.0)
    scaled.optimizer.loss_scale.scale = 1024.0
    train_step(plain)
    train_step(scaled)
    for expected, found in zip(plain.optimizer.shards, scaled.optimizer.shards, strict=True):
        assert torch.equal(found.state["exp_avg"], expected.state["exp_avg"])
        assert torch.equal(found.main, expected.main)


def test_each_step_has_its_own_learning_rate() -> None:
    run = tiny_run(lr_warmup_iters=4, lr=4e-3)
    assert [train_step(run).learning_rate for _ in range(4)] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


def test_skipped_steps_do_not_use_up_the_warm_up() -> None:
    run = tiny_run(fp16=True, lr_warmup_iters=4, lr=4e-3, initial_loss_scale=2.0**40, hysteresis=1, train_iters=100)
    results = [train_step(run) for _ in range(40)]
    assert results[0].skipped
    taken = [result for result in results if not result.skipped]
    assert [result.learning_rate for result in taken[:4]] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


def _ragged_loss() -> float:
    run = tiny_run(fp64=True)
    return evaluate(run, RaggedDataset(run.vocab_size, 16), 2)


def test_evaluation_is_a_mean_over_tokens_not_over_ranks() -> None:  # C48 C3
    alone = run_ranks(1, _ragged_loss)[0]
    assert run_ranks(2, _ragged_loss) == pytest.approx([alone, alone], rel=1e-12)


def test_evaluation_reads_the_validation_split_without_dropout() -> None:
    run = tiny_run(hidden_dropout=0.5, attention_dropout=0.5, fp64=True)
    batches = run.loader(run.splits.valid).step(0, 4)
    model = run.stages[0].eval()
    with torch.no_grad():
        losses = [model(batch["tokens"], labels=batch["labels"]).mean().item() for batch in batches]
    model.train()
    assert evaluate(run, run.splits.valid, 1) == pytest.approx(sum(losses) / 4, rel=1e-12)
    assert evaluate(run, run.splits.train, 1) != pytest.approx(sum(losses) / 4, rel=1e-6)


def test_finetuning_in_bf16_starts_from_the_stored_main_weights(tmp_path: Path) -> None:
    run = tiny_run(bf16=True, save=str(tmp_path))
    for _ in range(3):
        train_step(run)
    run.saver.save(run.state)
    tuned = tiny_run(bf16=True, load=str(tmp_path), finetune=True)
    assert tuned.state.iteration == 0
    for expected, found in zip(run.optimizer.shards, tuned.optimizer.shards, strict=True):
        assert torch.equal(found.main, expected.main)
        assert not torch.equal(found.main, found.main.bfloat16().float())


def test_train_samples_end_the_run_whatever_the_batches(tmp_path: Path) -> None:  # C63
    """Forty samples in batches of 4, and after a resume in batches of 8: forty remain, five steps."""
    samples = {"train_iters": None, "train_samples": 80, "micro_batch_size": 2}
    run = tiny_run(**samples, global_batch_size=4, save=str(tmp_path))
    assert run.total_iterations == 20
    for _ in range(10):
        train_step(run)
    run.saver.save(run.state)
    assert tiny_run(**samples, global_batch_size=4, load=str(tmp_path)).total_iterations == 20
    assert tiny_run(**samples, global_batch_size=8, load=str(tmp_path)).total_iterations == 15


def _first_batch(run: Run) -> Batch:
    return run.train_loader.step(0, 1)[0]


def _output(run: Run, batch: Batch) -> torch.Tensor:
    return run.stages[0](batch["tokens"], sequences=SequenceDetails(sample_index=batch["sample_index"]))


@pytest.mark.parametrize("groups", [4, 2])
def test_fused_and_unfused_attention_are_one_function(groups: int) -> None:
    shared = {"fp64": True, "init_method_std": 0.3, "group_query_attention": groups < 4}
    shared["num_query_groups"] = groups if groups < 4 else None
    fused, unfused = tiny_run(**shared), tiny_run(**shared, attention_backend="unfused")
    batch = _first_batch(fused)
    torch.testing.assert_close(_output(unfused, batch), _output(fused, batch), rtol=1e-12, atol=1e-12)


def test_dropout_depends_on_the_sample_the_layer_and_the_module() -> None:  # C27
    """Ones through every dropout of the model: all masks differ, and each depends on the sample."""
    run = tiny_run(hidden_dropout=0.5)
    model = run.stages[0]
    layers = list(model.decoder.layers.values())
    dropouts = [model.embedding.dropout, *(d for layer in layers for d in (layer.attention_dropout, layer.mlp_dropout))]
    ones = torch.ones(16, 2, 32)
    masks = [dropout(ones, torch.tensor([4, 5])) for dropout in dropouts]
    assert len(dropouts) == 5
    for i, mask in enumerate(masks):
        assert not torch.equal(mask[:, 0], mask[:, 1])
        assert all(not torch.equal(mask, other) for other in masks[:i])


def test_dropout_falls_on_the_embedding() -> None:
    run = tiny_run(hidden_dropout=0.5)
    embedding = run.stages[0].embedding
    batch = _first_batch(run)
    dropped = embedding(batch["tokens"], torch.arange(16)[None], SequenceContext(sample_index=batch["sample_index"]))
    assert 0.3 < (dropped == 0).float().mean() < 0.7


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        ({}, 4),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, 8),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 5),
    ],
    ids=["none", "uniform", "block"],
)
def test_recompute_runs_layers_again(settings: dict, forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(num_layers=4, **settings)
    seen: list[int] = []
    forward = TransformerLayer.forward

    def counted(layer, *args):
        seen.append(1)
        return forward(layer, *args)

    monkeypatch.setattr(TransformerLayer, "forward", counted)
    _output(run, _first_batch(run)).sum().backward()
    assert len(seen) == forwards


def test_selective_recompute_runs_attention_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for settings in ({}, {"recompute_granularity": "selective"}):
        run = tiny_run(attention_backend="unfused", **settings)
        core = run.stages[0].decoder.layers["0"].self_attention.core_attention
        seen: list[int] = []
        attend = core.by_reference
        monkeypatch.setattr(
            core,
            "by_reference",
            lambda *given, seen=seen, attend=attend, **named: seen.append(1) or attend(*given, **named),
        )
        _output(run, _first_batch(run)).sum().backward()
        counts.append(len(seen))
    assert counts == [1, 2]
