"""Hooks that wait for the weights of a unit, gathered in the background, before a module of the unit runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.parallel.compiled import outside_of_graphs


def wait_before_forward(
    root: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    bucket_of: Mapping[nn.Parameter, Bucket],
    finish_all: Callable[[], None],
    *,
    at_root: Sequence[Bucket],
) -> Iterator[RemovableHandle]:
    """Wait for a unit's weights when any of its modules is called first: the other modules may never be called.

    ``at_root`` are buckets that the root's forward waits for. ``state_dict()`` waits for all, by ``finish_all()``.
    """
    for module in root.modules():
        yield module.register_state_dict_pre_hook(lambda *_: finish_all())
    if at_root:
        yield root.register_forward_pre_hook(_waiter(at_root), prepend=True)
    for modules in units:
        read = [bucket_of[p] for module in modules for p in module.parameters() if p in bucket_of]
        for module in dict.fromkeys(inner for each in modules for inner in outside_of_graphs(each)):
            if module in modules or next(module.parameters(recurse=False), None) is not None:
                wait = _waiter(list(dict.fromkeys(read)))
                yield module.register_forward_pre_hook(wait, prepend=True)


def _waiter(buckets: Sequence[Bucket]) -> Callable[[nn.Module, object], None]:
    def wait(module: nn.Module, args: object) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait
