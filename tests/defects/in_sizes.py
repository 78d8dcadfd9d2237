"""Defects of layers of different sizes."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, call

IN_SIZES = (
    Defect(
        "channels of a linear layer in place of an MLP are in the reverse order of the ranks",
        "features.layer_sizes.linear_replacement:LinearReplacement.forward",
        argument("cat", 0, "SELF.flip(0).unbind()"),
        "layers of different sizes, tp2 sp",
        culprit="output of decoder.layers.1.mlp",
    ),
    Defect(
        "a rank gets every second token of a linear layer in place of an MLP",
        "features.layer_sizes.linear_replacement:LinearReplacement.forward",
        argument("exchange_parts", 0, "SELF.unflatten(0, (-1, self.tp_size)).transpose(0, 1)"),
        "layers of different sizes, tp4 sp",
        culprit="output of decoder.layers.1.mlp",
    ),
    Defect(
        "without sequence parallelism ranks mix up the channels of a linear layer",
        "features.layer_sizes.linear_replacement:LinearReplacement.forward",
        call("gather_channels", "OLD.roll(1, -1)"),
        "layers of different sizes, tp2",
        culprit="output of decoder.layers.1.mlp",
    ),
)
