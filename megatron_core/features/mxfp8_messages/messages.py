"""Rows of tokens, or of their gradients, in messages of 8 bits: e4m3 numbers, and a power of two for 32 of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.features.experts.dispatch import AllToAll
from megatron_core.features.experts.layer import MoELayer
from megatron_core.features.experts.row_exchange import RowsHandle
from megatron_core.features.fp8.casts import E4M3, Blocks, Quantised, quantise
from megatron_core.features.fp8.settings import SMALL_BLOCK
from megatron_core.features.mxfp8_messages.settings import MXFP8MessagesConfig
from megatron_core.ops import Backend
from megatron_core.parallel.collectives import start_all_to_all_rows
from megatron_core.parallel.groups import Group

ROW_BLOCKS = Blocks(1, SMALL_BLOCK)
E8M0 = torch.float8_e8m0fnu
"""Powers of two."""


def send_mxfp8(config: RunConfig, stage: nn.Module, groups: Any, *, initialise: bool) -> None:
    """Send the messages of the stage's experts in the formats of the settings; see ``Feature.change_stage``."""
    formats = config.section(MXFP8MessagesConfig)
    tokens = formats.moe_dispatch_fwd_dtype
    gradients = formats.moe_combine_bwd_dtype
    for layer in stage.modules():
        if isinstance(layer, MoELayer):
            narrow_messages(layer, tokens, gradients, config.model.kernel_backend)


def narrow_messages(layer: MoELayer, tokens: str, gradients: str, backend: Backend = "auto") -> None:
    """Send a layer's tokens, and the gradients of its experts' outputs, in MXFP8 where the format is "mxfp8"."""
    if not isinstance(layer.dispatcher, AllToAll):
        return
    narrow = MXFP8Rows(backend)
    if tokens == "mxfp8":
        layer.dispatcher.send_tokens = narrow
    if gradients == "mxfp8":
        layer.dispatcher.send_gradients = narrow


class MXFP8Rows:
    """Start all-to-alls as ``start_all_to_all_rows``, with rows of channels rounded to MXFP8.

    A row is rounded by its own numbers alone, and also if it stays on this rank, so that no layout changes a value.
    Source: Rouhani et al. 2023, with scales rounded so that nothing is clamped, as Transformer Engine does.
    """

    def __init__(self, backend: Backend = "auto") -> None:
        self.backend = backend

    def __call__(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> tuple[Tensor, RowsHandle]:
        """``[R, h]`` is rounded; ``[R]``, the probabilities of rows, is not."""
        if x.dim() == 1:
            return start_all_to_all_rows(x, send, receive, group)
        message, handle = start_all_to_all_rows(pack_rows(x, self.backend), send, receive, group)
        rows = x.new_empty(message.shape[0], x.shape[1])
        return rows, Unpacked(handle, message, rows)


class Unpacked:
    """The handle of a message whose numbers are written to ``rows`` when it has arrived."""

    def __init__(self, arriving: RowsHandle, message: Tensor, rows: Tensor) -> None:
        self._arriving = arriving
        self._message = message
        self._rows = rows

    def wait(self) -> None:
        """Wait for the message and write its numbers."""
        self._arriving.wait()
        data, inverse = self._message.split([self._rows.shape[1], self._message.shape[1] - self._rows.shape[1]], 1)
        scale = inverse.view(E8M0).float().reciprocal()
        self._rows.copy_(Quantised(data.view(E4M3), scale, ROW_BLOCKS).dequantised(self._rows.dtype))


def pack_rows(x: Tensor, backend: Backend) -> Tensor:
    """The bytes ``[R, h + ceil(h / 32)]`` of a message: numbers, then 1 / scale of each block, as exponents."""
    quantised = quantise(x, E4M3, ROW_BLOCKS, power_of_two=True, backend=backend)
    # The only scales of a matrix without rows are not those of a row.
    inverse = quantised.inverse[: x.shape[0]].to(E8M0)
    # One message: two would cost a latency each.
    return torch.cat([quantised.data.view(torch.uint8), inverse.view(torch.uint8)], 1)
