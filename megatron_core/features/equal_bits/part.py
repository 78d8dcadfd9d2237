"""The note of a run with equal bits."""

from collections.abc import Iterator

from megatron_core.features.equal_bits import fixed_products
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run


class EqualBitsPart(RunPart):
    """Names the kernels of the products, which must be the same in all runs that are compared."""

    def __init__(self, run: Run) -> None:
        self.device = run.world.device

    def notes(self) -> Iterator[str]:
        """The kernels."""
        yield f"products of --layout-invariant: {fixed_products.describe_products(self.device.type)}"
