"""Defects of layers of different sizes."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_SIZES = (
    Defect(
        "channels of a linear layer in place of an MLP are in the reverse order of the ranks",
        "transformer.linear_replacement:LinearReplacement.forward",
        "torch.cat(by_rank.unbind(), dim=-1)",
        "torch.cat(by_rank.flip(0).unbind(), dim=-1)",
        "layers of different sizes, tp2 sp",
        culprit="output of decoder.layers.1.mlp",
    ),
    Defect(
        "a rank gets every second token of a linear layer in place of an MLP",
        "transformer.linear_replacement:LinearReplacement.forward",
        "output.unflatten(0, (self.tp_size, -1))",
        "output.unflatten(0, (-1, self.tp_size)).transpose(0, 1)",
        "layers of different sizes, tp4 sp",
        culprit="output of decoder.layers.1.mlp",
    ),
    Defect(
        "without sequence parallelism ranks mix up the channels of a linear layer",
        "transformer.linear_replacement:LinearReplacement.forward",
        "gather_channels(output, self.tp_group)",
        "gather_channels(output, self.tp_group).roll(1, -1)",
        "layers of different sizes, tp2",
        culprit="output of decoder.layers.1.mlp",
    ),
)
