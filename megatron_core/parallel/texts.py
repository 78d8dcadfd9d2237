"""Exchange of texts between ranks as plain bytes, and lists of names for messages."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_core.parallel.collectives import all_gather_flat_, broadcast_
from megatron_core.parallel.groups import Group


def gather_texts(text: str, group: Group, device: torch.device) -> list[str]:
    """Gather every rank's ``text`` in group order; a collective call.

    Lengths are gathered first, then the texts in UTF-8, padded to the longest. No pickle.
    """
    if group.size() == 1:
        return [text]
    data = _encoded(text, device)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    all_gather_flat_(lengths, torch.tensor([data.numel()], dtype=torch.int64, device=device), group)
    sizes = lengths.tolist()
    longest = max(sizes)
    if longest == 0:
        return [""] * group.size()
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: data.numel()] = data
    full = torch.zeros(longest * group.size(), dtype=torch.uint8, device=device)
    all_gather_flat_(full, mine, group)
    rows = full.view(-1, longest).cpu().numpy()
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def tell_all(text: str, device: torch.device) -> list[str]:
    """Gather the ``text`` of all ranks of the job; a collective call."""
    if not dist.is_initialized():
        return [text]
    everyone = dist.group.WORLD
    assert everyone is not None
    return gather_texts(text, everyone, device)


def all_agree(ok: bool, device: torch.device) -> bool:
    """Whether ``ok`` is True on all ranks of the job; a collective call."""
    return not any(tell_all("" if ok else "no", device))


def tell_from(source: int, text: str, device: torch.device) -> str:
    """Broadcast the ``text`` of rank ``source`` to all ranks of the job; a collective call."""
    if not dist.is_initialized():
        return text
    everyone = dist.group.WORLD
    assert everyone is not None
    data = _encoded(text, device)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    broadcast_(size, source, everyone)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data.numel():
        broadcast_(data, source, everyone)
    return data.cpu().numpy().tobytes().decode()


def _encoded(text: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy()).to(device)


def listed(names: Sequence[object], most: int = 8) -> str:
    """Join the names with commas; a long list is cut after ``most`` names, with the number of the rest."""
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
