"""Check that the model in this folder computes the same in every layout as in one process.

    python -m examples.custom_model.verify
    python -m examples.custom_model.verify --forget        # with a planted error

--forget does not mark the gradients of the norms as partial under sequence parallelism. Training would not fail and the
loss would still fall; the report names the parameters with wrong gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from examples.custom_model.model import NextItem, NextItemConfig, Norm
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.sharding import amend_spec
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.verify import ModelUnderTest, ModuleExperiment, check_parity
from megatron_core.verify.table import TerminalTable, summary_line

LAYOUTS = (
    "tp2",
    "tp2 sp",
    "tp4 sp",
    "dp2",
    "dp4 zero1 overlap",
    "pp2",
    "pp2 v2",
    "cp2",
    "cp2 tp2 sp zero1",
    "tp2 pp2 sp",
    "tp2 dp2 sp zero1",
)
LENGTH = 12


@dataclass(frozen=True)
class NextItemUnderTest(ModelUnderTest):
    """The model, and random sequences of different lengths."""

    config: NextItemConfig = field(default_factory=NextItemConfig)
    forget: bool = False

    def build(self, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig) -> nn.Module:
        """Build a stage of the model."""
        module = NextItem(self.config, stage, num_stages, groups, options)
        for norm in norms(module) if self.forget else ():
            amend_spec(norm.weight, partial_axes=())
        return module

    def samples(self, first: int, count: int) -> dict[str, Tensor]:
        """Sequences number ``first`` to ``first + count - 1``; each depends only on its number."""
        rngs = [torch.Generator().manual_seed(number) for number in range(first, first + count)]
        items = torch.stack([torch.randint(self.config.items, (LENGTH + 1,), generator=rng) for rng in rngs])
        lengths = torch.tensor([1 + number * 5 % LENGTH for number in range(first, first + count)])
        mask = torch.arange(LENGTH)[None, :] < lengths[:, None]
        return {"seen": items[:, :-1], "following": items[:, 1:], "mask": mask}

    def count(self, batch: dict[str, Tensor]) -> float:
        """Number of positions under the mask."""
        return batch["mask"].sum().item()

    def forward(self, module: nn.Module, batch: dict[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Hidden states, or on the last stage the sum of the losses under the mask."""
        output = module(batch["seen"], batch["following"], hidden)
        return (output * batch["mask"].transpose(0, 1)).sum() if module.scores is not None else output

    def message_shape(self, batch: dict[str, Tensor]) -> tuple[int, ...]:
        """``[s, b, h]``."""
        count, length = batch["seen"].shape
        return (length, count, self.config.hidden_size)


def norms(module: nn.Module) -> Iterator[Norm]:
    """All norms in a stage."""
    return (each for each in module.modules() if isinstance(each, Norm))


def main() -> int:
    """Print the table; return 0 if all layouts hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forget", action="store_true", help="do not mark the norms' gradients as partial")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="layouts, for example: 'tp2 sp' 'pp2 v2'")
    args = parser.parse_args()
    table = TerminalTable(list(args.layouts), "float64")
    print(table.head())
    report = check_parity(
        ModuleExperiment(NextItemUnderTest(forget=args.forget)),
        args.layouts,
        on_row=lambda row: print(*table.lines(row), sep="\n", flush=True),
    )
    print(summary_line(report))
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
