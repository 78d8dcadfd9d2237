"""The split of sequences, and a rank's part of a micro-batch."""

from __future__ import annotations

import pytest
import torch

from megatron_core.parallel.micro_batch import MicroBatch, SequenceSplit

CPU = torch.device("cpu")
BATCH = {
    "tokens": torch.arange(24).view(2, 12),
    "labels": torch.arange(24).view(2, 12) + 1,
    "loss_mask": torch.ones(2, 12),
    "sample_index": torch.tensor([4, 5]),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_residual_parts_make_up_the_sequence(size: int, sequence_parallel: bool) -> None:
    splits = [SequenceSplit(rank, size, sequence_parallel) for rank in range(size)]
    parts = [split.residual(split.positions(12)) for split in splits]
    whole = torch.cat(parts) if sequence_parallel else parts[-1]
    assert whole.tolist() == list(range(12))
    assert [len(part) for part in parts] == [split.residual_length(12) for split in splits]
    assert [split.owns_loss for split in splits] == [True] + [False] * (size - 1)
    rows = splits[-1].residual(BATCH["tokens"], dim=1)
    assert rows.tolist() == [parts[-1].tolist(), (parts[-1] + 12).tolist()]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_have_the_length_of_residual_parts(sequence_parallel: bool) -> None:
    """Of a sequence that context-parallel ranks share, and with sequence parallelism tensor-parallel ranks, too."""
    split = SequenceSplit(tp_rank=1, tp_size=2, cp_rank=1, cp_size=2, sequence_parallel=sequence_parallel)
    residual = split.residual(split.local(torch.arange(24).unsqueeze(0)), dim=1)
    assert split.message_length(24) == residual.shape[1] == (6 if sequence_parallel else 12)


def test_a_batch_of_whole_sequences() -> None:
    micro = MicroBatch.of(BATCH, SequenceSplit(1, 2, sequence_parallel=True), CPU)
    assert micro.residual_length == 6
    assert micro.positions.tolist() == list(range(12))
    assert (micro.position_ids, micro.document_lengths) == (None, None)
    assert all(torch.equal(getattr(micro, name), tensor) for name, tensor in BATCH.items())


def test_document_lengths_stay_on_the_host() -> None:
    """Attention by documents needs them as Python integers; reading them would synchronize."""
    packed = BATCH | {"position_ids": BATCH["tokens"] % 5, "document_lengths": torch.tensor([[5, 7], [12, 0]])}
    micro = MicroBatch.of(packed, SequenceSplit(), torch.device("meta"))
    assert micro.document_lengths == ((5, 7), (12,))
    tensors = [value for value in vars(micro).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert {tensor.device.type for tensor in tensors} == {"meta"}
