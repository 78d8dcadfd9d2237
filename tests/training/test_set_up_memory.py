"""Setting up a rank needs little more memory than its permanent state."""

from __future__ import annotations

import pytest

from megatron_core.verify.ranks import run_ranks
from tests.memory import needs_proc, resident, start_anew
from tests.runs import tiny_run

MODEL = {
    "num_layers": 3,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 16384,
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 128,
    "ddp_bucket_size": 4_000_000,
}


def _peak_and_kept(settings: dict) -> tuple[int, int]:
    """Bytes by which this process's peak grew, and bytes of weights, gradients and optimizer state."""
    tiny_run()  # loaded and compiled once, before the measurement
    start_anew()
    before = resident("VmRSS")
    run = tiny_run(**MODEL | settings)
    grown = resident("VmHWM") - before
    kept = sum(tensor.nbytes for bucket in run.data_parallel.buckets for tensor in (bucket.weights, bucket.grads))
    kept += sum(tensor.nbytes for _, tensors in run.optimizer.tensors() for tensor in tensors.values())
    return grown, kept


@pytest.mark.drawn(1)
@needs_proc
@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {}), (2, {"tensor_model_parallel_size": 2})], ids=["one process", "tp2"]
)
def test_peak_is_at_most_a_fifth_above_what_is_kept(ranks: int, settings: dict) -> None:
    """Only the local part of a weight is drawn, a chunk at a time, and buckets take over weights one by one."""
    for grown, kept in run_ranks(ranks, _peak_and_kept, settings):
        assert kept > 200e6 / ranks
        assert 0.9 * kept < grown < 1.2 * kept
