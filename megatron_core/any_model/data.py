"""Micro-batches of a map-style data set for any model: a function of seed, epoch and position only."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_core.any_model.arguments import check_dataset
from megatron_core.errors import ConfigError


class _Positions(Sampler[list[int]]):
    """Indices of this data-parallel rank's micro-batches of one epoch, from ``consumed()`` samples on."""

    def __init__(self, loader: "EngineLoader") -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        loader = self.loader
        epoch, first = divmod(loader.consumed(), loader.epoch_samples)
        order = loader.order(epoch)
        size = loader.micro_batch_size
        together = loader.micro_batch_size * loader.ranks
        for start in range(first + loader.rank * size, loader.epoch_samples, together):
            yield order[start : start + size].tolist()


@dataclass(kw_only=True, eq=False)
class EngineLoader:
    """Iterates over one epoch of micro-batches of this data-parallel rank; it resumes at the engine's position.

    Sample i of an epoch is entry i of a permutation that depends on (seed, epoch) alone; step t reads the samples
    ``t * global_batch_size`` and following, in the same micro-batches for every number of ranks. The incomplete global
    batch at the end of an epoch is left out.
    """

    dataset: Dataset[Any]
    micro_batch_size: int
    global_batch_size: int
    rank: int
    ranks: int
    seed: int
    consumed: Callable[[], int]
    shuffle: bool = True
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        check_dataset(self.dataset)
        self.count = len(self.dataset)  # type: ignore[arg-type]
        self.epoch_samples = self.count // self.global_batch_size * self.global_batch_size
        if self.epoch_samples == 0:
            raise ConfigError(
                f"training_data has {self.count} samples, fewer than global_batch_size={self.global_batch_size}; give "
                "a smaller batch"
            )
        self._loader = DataLoader(
            self.dataset,
            batch_sampler=_Positions(self),
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
        )

    def order(self, epoch: int) -> torch.Tensor:
        """Return the permutation of ``epoch``."""
        if not self.shuffle:
            return torch.arange(self.count)
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the current epoch."""
        return iter(self._loader)

    def __len__(self) -> int:
        """Number of micro-batches of this rank in a whole epoch."""
        return self.epoch_samples // (self.micro_batch_size * self.ranks)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``, inside of tuples, lists and dicts too."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Return a context with ``module`` in evaluation mode; the mode of each submodule is restored afterwards."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


def model_arguments(model: Callable[..., Any], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``model`` for a batch: a dict by name, a tuple in order, or one tensor.

    An ``nn.Sequential`` gets only the first entry of a tuple, without the labels.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, tuple | list):
        return (batch,), {}
    has_one_input = isinstance(getattr(model, "module", model), nn.Sequential)
    return tuple(batch[:1] if has_one_input else batch), {}


def loss_of(output: Any) -> Tensor:
    """Return the loss in a module's output: a scalar tensor, the attribute or entry ``loss``, or the first entry."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(loss, Tensor):
        return loss
    raise ConfigError(f"the model returns {type(output).__name__} without a loss; give loss_function(output, batch)")


def kind_of(batch: Any) -> str:
    """Return a digest of the nesting, shapes and dtypes of a micro-batch."""
    return hashlib.sha256(json.dumps(_shapes(batch)).encode()).hexdigest()[:16]


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, Mapping):
        return {str(name): _shapes(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_shapes(inner) for inner in value]
    return type(value).__name__
