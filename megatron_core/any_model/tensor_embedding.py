"""Tables of any model whose rows are split over tensor-parallel ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.parallel.collectives import reduce_from_region
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.lookup import vocab_parallel_lookup


class ParallelEmbedding(nn.Module):
    """A table whose rows are split over ``group``; ids ``[...]`` -> ``[..., h]``."""

    embed_scale: Tensor | float | None
    """Factor of all rows."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx
        self.group = group
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        scale = _scale_of(embedding)
        if isinstance(scale, Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """Look up this rank's rows; the sum over the ranks completes the others."""
        rows = vocab_parallel_lookup(ids, self.weight, self.group.rank() * len(self.weight), self.group.size())
        if self.padding_idx is not None:  # its row gets no gradient
            rows = torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return _scaled(reduce_from_region(rows, self.group), self.embed_scale)


@torch.no_grad()
def is_table(module: Any) -> bool:
    """Whether ``module`` is an ``nn.Embedding``, or a subclass that returns rows times ``embed_scale``."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    if type(module) is nn.Embedding:
        return True
    # Gemma multiplies by the root of the width. A forward of another kind is found by its values.
    ids = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
    return torch.equal(module(ids), _scaled(module.weight[ids], _scale_of(module)))


def _scale_of(module: nn.Embedding) -> Tensor | float | None:
    return getattr(module, "embed_scale", None)


def _scaled(rows: Tensor, scale: Tensor | float | None) -> Tensor:
    if scale is None:
        return rows
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)
