"""Exchange of texts between ranks as plain bytes, and lists of names for messages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from megatron_core.errors import CheckpointError, ConfigError, MegatronError
from megatron_core.parallel.collectives import all_gather_flat_, broadcast_
from megatron_core.parallel.groups import Group


def gather_strings(text: str, group: Group, device: torch.device) -> list[str]:
    """Gather every rank's ``text`` in group order; a collective call.

    Lengths are gathered first, then the texts in UTF-8, padded to the longest. No pickle.
    """
    if group.size() == 1:
        return [text]
    # Two collectives of tensors instead of ``all_gather_object``, which would unpickle bytes of other ranks.
    data = encoded_text(text, device)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    all_gather_flat_(lengths, torch.tensor([data.numel()], dtype=torch.int64, device=device), group)
    sizes = lengths.tolist()
    longest = max(sizes)
    # All ranks know the lengths, so they leave together.
    if longest == 0:
        return [""] * group.size()
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    full = torch.zeros(longest * group.size(), dtype=torch.uint8, device=device)
    all_gather_flat_(full, padded, group)
    rows = full.view(-1, longest).cpu().numpy()
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


@contextmanager
def raising_on_all_ranks(device: torch.device) -> Iterator[None]:
    """Return a context whose errors on one rank are raised on all ranks; it must not contain collectives."""
    failure: Exception | None = None
    message = ""
    try:
        yield
    except Exception as error:
        failure = error
        message = str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
    # Also without an error of this rank: the others wait in this collective.
    by_rank = gather_from_all_ranks(message, device)
    # The rank with the error keeps its traceback.
    if failure is not None:
        raise failure
    rank = next((rank for rank, text in enumerate(by_rank) if text), None)
    if rank is not None:
        raise ConfigError(f"rank {rank}: {by_rank[rank]}")


def gather_from_all_ranks(text: str, device: torch.device) -> list[str]:
    """Gather the ``text`` of all ranks of the job; a collective call."""
    if not dist.is_initialized():
        return [text]
    everyone = dist.group.WORLD
    assert everyone is not None
    return gather_strings(text, everyone, device)


def all_agree(ok: bool, device: torch.device) -> bool:
    """Whether ``ok`` is True on all ranks of the job; a collective call."""
    return not any(gather_from_all_ranks("" if ok else "no", device))


def broadcast_from_rank(source: int, text: str, device: torch.device) -> str:
    """Broadcast the ``text`` of rank ``source`` to all ranks of the job; a collective call."""
    if not dist.is_initialized():
        return text
    everyone = dist.group.WORLD
    assert everyone is not None
    data = encoded_text(text, device)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    broadcast_(size, source, everyone)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data.numel():
        broadcast_(data, source, everyone)
    return data.cpu().numpy().tobytes().decode()


def encoded_text(text: str, device: torch.device) -> torch.Tensor:
    """The UTF-8 bytes of a text on a device: uint8 ``[n]``."""
    # A copy, because the memory of Python's bytes is read-only and torch would warn.
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy()).to(device)


def listed(names: Sequence[object], most: int = 8) -> str:
    """Join the names with commas; a long list is cut after ``most`` names, with the number of the rest."""
    first_names = ", ".join(map(str, names[:most]))
    return f"{first_names} and {len(names) - most} more" if len(names) > most else first_names


def raise_on_all_ranks(problem: str, device: torch.device) -> None:
    """Wait for all ranks. Errors: ``CheckpointError`` on all of them if one has a ``problem``, with the first one."""
    fault = next(filter(None, gather_from_all_ranks(problem, device)), "")
    if fault:
        raise CheckpointError(fault)
