"""Keyed dropout without generator state.

The mask of ``KeyedDropout`` is a pure function of (seed, module, sample, position, channel), which
``megatron_core.ops.reference`` defines. It uses no random number generator. Therefore the layout, the number of
micro-batches, recomputation and resuming cannot change the mask, and there is no state to save.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_core.ops import Backend, bias_dropout_add
from megatron_core.parallel.initialization import name_seed

if not TYPE_CHECKING:
    from megatron_core.moved import old_names_of

    __getattr__ = old_names_of(__name__)


class KeyedDropout(torch.nn.Module):
    """x -> residual + keep (x + bias) / (1 - p), where keep is 0 or 1 for each element.

    ``p`` is the probability of 0; ``name`` identifies the dropout in the model (such as ``layers.3.attention``).
    """

    def __init__(self, p: float, seed: int, name: str, backend: Backend = "auto") -> None:
        super().__init__()
        self.p = p
        # By name and not by a counter, so that the mask does not depend on how many layers a stage has.
        self.key = name_seed(seed, f"dropout:{name}")
        self.backend = backend

    @property
    def active(self) -> bool:
        """Whether anything is dropped: in training with p > 0."""
        return self.training and self.p > 0.0

    def forward(
        self,
        x: Tensor,
        sample_index: Tensor | None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        position_ids: Tensor | None = None,
        key_positions: Tensor | None = None,
        first_head: int = 0,
    ) -> Tensor:
        """Drop elements of ``x``: activations ``[s, b, h]``, or attention weights ``[b, heads, s, t]`` whose first head
        is ``first_head``. ``sample_index`` ``[b]`` holds the global numbers of the sequences.

        ``position_ids`` ``[s]`` or ``[b, s]`` are the global positions of the rows, ``key_positions`` ``[t]`` those of
        the keys, both int64; None means 0, 1, 2, .... ``bias`` and ``residual`` are added even if dropout is off.
        """
        p = self.p if self.active else 0.0
        numbers = (sample_index, position_ids, key_positions, first_head)
        return bias_dropout_add(x, bias, residual, p, self.key, *numbers, backend=self.backend)
