"""FSDP2: wrong weights of ranks and micro-batches in the gradient, as in published bugs of trainers.

Each of two ranks has three micro-batches with different numbers of samples and tokens. ``rank_tokens``: torchtitan
issue 1842. ``micro_batch_tokens``: verl issue 7200. ``sample_share``: verl issue 5625. ``generation_batch``: trl pull
request 6024. ``divided_twice``: ms-swift issue 10117. ``unsummed``: the gradients of ranks are not summed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_core.verify import compare

WIDTH, VOCABULARY, LENGTH = 8, 32, 6
SAMPLES = (1, 2, 1, 2, 1, 1)
TOKENS = ((3,), (5, 6), (4,), (2, 1), (2,), (6,))
"""Numbers of tokens of the samples of each micro-batch."""


def step(folder: str, bug: str = "") -> list[str]:
    """One step whose micro-batches all ranks share."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)).double()
    if bug != "unsummed" and size > 1:
        fully_shard(model)
    watch = compare(model, folder, averaged=size, dp=(rank, size))
    count = len(TOKENS) // size
    torch.manual_seed(1)
    for number, lengths in enumerate(TOKENS):
        tokens = torch.randint(VOCABULARY, (len(lengths), LENGTH))
        if number // count != rank:
            continue
        watch.micro_batch(number, tokens=sum(lengths), samples=len(lengths))
        mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
        losses = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
        scale = 1 / sum(map(sum, TOKENS)) if size == 1 else _scale(bug, number, rank, size)
        (losses * mask.flatten()).sum().mul(scale).backward()
    watch.gradients()
    return watch.finish()


def _scale(bug: str, number: int, rank: int, size: int) -> float:
    """The factor of the sum of a micro-batch's token losses, before FSDP2 averages gradients over ranks."""
    count = len(TOKENS) // size
    on_rank = TOKENS[rank * count : (rank + 1) * count]
    total = sum(map(sum, TOKENS))
    scales = {
        "": size / total,
        "rank_tokens": 1 / sum(map(sum, on_rank)),
        "micro_batch_tokens": 1 / sum(TOKENS[number]),
        "sample_share": SAMPLES[number] / sum(map(len, on_rank)) / sum(TOKENS[number]),
        "generation_batch": size / total / 4,  # tokens of four times as many micro-batches
        "divided_twice": size / total / count,
        "unsummed": 1 / total,
    }
    return scales[bug]
