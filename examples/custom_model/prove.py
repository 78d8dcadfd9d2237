"""Prove that the model of this folder computes in every layout what it computes in one process.

    python -m examples.custom_model.prove
    python -m examples.custom_model.prove --forget        # what a silent failure looks like

--forget leaves out the one word that says that the norms' gradients are partial under sequence parallelism. Nothing
crashes and the loss falls all the same; the proof names the parameters whose gradients are wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from examples.custom_model.model import NextItem, Norm, Shop
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.sharding import amend_spec
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.verify import ModuleExperiment, Subject, prove
from megatron_core.verify.table import TerminalTable, summary

LAYOUTS = (
    "tp2",
    "tp2 sp",
    "tp4 sp",
    "dp2",
    "dp4 zero1 overlap",
    "pp2",
    "pp2 v2",
    "tp2 pp2 sp",
    "tp2 dp2 sp zero1",
)
LENGTH = 12


@dataclass(frozen=True)
class ShopVisits(Subject):
    """The model, and made-up visits of different lengths."""

    shop: Shop = field(default_factory=Shop)
    forget: bool = False

    def build(self, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig) -> nn.Module:
        """A stage of the model."""
        module = NextItem(self.shop, stage, num_stages, groups, options)
        for norm in norms(module) if self.forget else ():
            amend_spec(norm.weight, partial_grad=False)
        return module

    def samples(self, first: int, count: int) -> dict[str, Tensor]:
        """Visits are functions of their numbers."""
        visits = [torch.Generator().manual_seed(number) for number in range(first, first + count)]
        items = torch.stack([torch.randint(self.shop.items, (LENGTH + 1,), generator=visit) for visit in visits])
        lengths = torch.tensor([1 + number * 5 % LENGTH for number in range(first, first + count)])
        mask = torch.arange(LENGTH)[None, :] < lengths[:, None]
        return {"seen": items[:, :-1], "following": items[:, 1:], "mask": mask}

    def count(self, batch: dict[str, Tensor]) -> float:
        """Places of the visits that are there."""
        return batch["mask"].sum().item()

    def forward(self, module: nn.Module, batch: dict[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Hidden states, or the sum of the losses."""
        output = module(batch["seen"], batch["following"], hidden)
        return (output * batch["mask"].transpose(0, 1)).sum() if module.scores is not None else output

    def message_shape(self, batch: dict[str, Tensor]) -> tuple[int, ...]:
        """``[s, b, h]``."""
        visits, length = batch["seen"].shape
        return (length, visits, self.shop.hidden_size)


def norms(module: nn.Module) -> Iterator[Norm]:
    """All norms of a stage."""
    return (each for each in module.modules() if isinstance(each, Norm))


def main() -> int:
    """Print the table; 0 if all layouts hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forget", action="store_true", help="plant the failure")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="layouts in words, as in: 'tp2 sp' 'pp2 v2'")
    args = parser.parse_args()
    table = TerminalTable(list(args.layouts), "float64")
    print(table.head())
    proof = prove(
        ModuleExperiment(ShopVisits(forget=args.forget)),
        args.layouts,
        on_row=lambda row: print(*table.lines(row), sep="\n", flush=True),
    )
    print(summary(proof))
    return 0 if proof.holds else 1


if __name__ == "__main__":
    sys.exit(main())
