"""Loaders of micro-batches in DeepSpeed's order: torch's ``DistributedSampler`` with shuffling."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from deepspeed.runtime.data_pipeline.curriculum_sampler import CurriculumSampler


class RepeatingLoader:
    """Iterates over ``loader`` again and again."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """Micro-batches of one data-parallel rank; each iteration starts a new pass."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int = 1,
        data_parallel_rank: int = 0,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Any = None,
    ) -> None:
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, data_sampler
        order: dict[str, Any]
        if isinstance(data_sampler, CurriculumSampler):
            order = {"batch_sampler": data_sampler, "num_workers": data_sampler.workers}
        else:
            order = {"batch_size": batch_size, "sampler": data_sampler, "num_workers": num_local_io_workers or 0}
            order["drop_last"] = dataloader_drop_last
        self.loader = DataLoader(dataset, pin_memory=pin_memory, collate_fn=collate_fn, **order)
        self.data: Iterator[Any] | None = None
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        """Changes each batch of a curriculum, given the state of its sampler."""

    def __iter__(self) -> "DeepSpeedDataLoader":
        self.data = iter(self.loader)
        return self

    def __next__(self) -> Any:
        if self.data is None:
            self.data = iter(self.loader)
        batch = next(self.data)
        if self.post_process_func is not None and isinstance(self.data_sampler, CurriculumSampler):
            batch = self.post_process_func(batch, self.data_sampler.state_dict())
        return batch

    def __len__(self) -> int:
        return len(self.loader)
