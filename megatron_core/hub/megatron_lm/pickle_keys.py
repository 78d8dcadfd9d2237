"""Sizes of the tuples in a pickle, before it is loaded: loading hashes the tuples that are keys of dicts."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

LARGEST_TUPLE = 2**24
"""Largest number of elements of a tuple, counting a shared one at each use; Python hashes them in 0.5 s."""
PICKLES_BEFORE_1_6 = 5
"""Pickles at the beginning of a file of torch before 1.6, which is not an archive."""
WITH_SIZE = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX"}
"""Opcodes that make a tuple, or an object that may be hashed by the elements of its arguments."""
PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


class _Effect(NamedTuple):
    """Change of the stack by an opcode."""

    to_mark: bool
    """Whether it takes all objects above the last mark."""
    taken: int
    """Number of further objects that it takes."""
    pushed: int
    has_size: bool


def _effect(opcode: pickletools.OpcodeInfo) -> _Effect:
    before, mark = list(opcode.stack_before), pickletools.markobject
    to_mark = mark in before
    taken = before.index(mark) if to_mark else len(before)
    return _Effect(to_mark, taken, len(opcode.stack_after), opcode.name in WITH_SIZE)


EFFECTS = {opcode.name: _effect(opcode) for opcode in pickletools.opcodes}


def check_metadata(data: bytes) -> None:
    """``ValueError`` for a pickle with a tuple of more than ``LARGEST_TUPLE`` elements."""
    _check(io.BytesIO(data))


def check_torch_file(source: Path | bytes) -> None:
    """The same for a file of ``torch.save``."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            for _ in range(PICKLES_BEFORE_1_6):
                _check(file)
            return
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    _check(io.BytesIO(archive.read(name)))


def _check(file: IO[bytes]) -> None:
    """Run one pickle with the sizes of objects in place of the objects."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in GETS:
            stack.append(memo[argument])
        elif name in PUTS:
            memo[argument] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            to_mark, taken, pushed, has_size = EFFECTS[name]
            first = (marks.pop() if to_mark else len(stack)) - taken
            if first < 0:
                raise ValueError(f"its opcode {name} takes more objects than there are")
            if has_size:
                size = 1 + sum(stack[first:])
                if size > LARGEST_TUPLE:
                    raise ValueError(
                        f"it has a tuple of more than {LARGEST_TUPLE:,} elements, counting a shared one at each use"
                    )
                stack[first:] = [size]
            else:
                stack[first:] = [1] * pushed
