"""Read Megatron-LM's pickles without executing code that they name.

``torch.load`` with ``weights_only`` creates tensors and plain containers only. Other objects that Megatron-LM stores
(its arguments, states of random generators) become inert objects; any other name is refused. The sizes of tuples are
computed before a pickle is loaded, because loading hashes the tuples that are keys of dicts.
"""

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from megatron_core.errors import CheckpointError, first_line, quoted
from megatron_core.text_file import refuse_pipe

INERT = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.Signals|_io\.BytesIO|_codecs\.encode|pathlib\.\w+"
    r"|numpy(\.\w+)+|(megatron|transformer_engine)(\.\w+)+"
)
"""Names that are replaced by a class without behaviour."""
METADATA = {
    "collections": {"OrderedDict"},
    "torch": {"Size", "contiguous_format", "strided"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Records that describe a folder of ``torch.distributed.checkpoint``."""
DAMAGE = (
    *(MemoryError, OverflowError, RuntimeError, SystemError, OSError, EOFError, ValueError, TypeError),
    *(AttributeError, LookupError, AssertionError, pickle.UnpicklingError, zipfile.BadZipFile),
)
"""Errors that reading a damaged file may raise."""
PLANS = {
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreSavePlan"},
}
"""Records of the save operation in the metadata of Megatron Core, the second until 0.14; they are not used."""


MOST_SHARED = 10**6
"""Largest number of elements of an object, counting a shared one at each use, unless it stores a tenth of them."""
DEEPEST = 100
"""Maximum nesting of containers."""


class Inert:
    """Stands for an object of a name in ``INERT``: it stores its arguments and has no behaviour."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.arguments = state


def load_tensors(source: Path | bytes, inert: re.Pattern[str] = INERT, name: str = "a stored object") -> Any:
    """Load the output of ``torch.save``; tensors in a file are memory-mapped, but those of torch before 1.6.

    ``inert``: names that are replaced by ``Inert``; ``name``: that of bytes, for errors.
    Errors: ``CheckpointError`` for a file that is damaged or names a Python object outside of ``inert``.
    """
    label = source if isinstance(source, Path) else name
    try:
        if isinstance(source, Path):
            refuse_pipe(source)
        check_torch_file(source)
        file: Any = str(source) if isinstance(source, Path) else io.BytesIO(source)
        # In a file of torch before 1.6, which is not an archive, torch.load itself refuses all names.
        archive = zipfile.is_zipfile(source if isinstance(source, Path) else io.BytesIO(source))
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if archive else []
        refused = [name for name in names if not inert.fullmatch(name)]
        if refused:
            raise CheckpointError(
                f"{label} names the Python object {refused[0]}, which is not allowed in a checkpoint; save the "
                "checkpoint without it"
            )
        if not isinstance(source, Path):
            file.seek(0)
        stand_ins: list[Any] = [(type("Inert", (Inert,), {}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            mapped = archive and isinstance(source, Path)
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        check_sizes(content)
        return content
    except CheckpointError:
        raise
    except DAMAGE as error:
        text = first_line(error).split(". ")[0]
        raise CheckpointError(f"{label} cannot be read: {text}; copy the whole checkpoint again") from None


def load_metadata(path: Path) -> Any:
    """Load the ``.metadata`` of ``torch.distributed.checkpoint``. Errors: as ``load_tensors``."""
    try:
        data = path.read_bytes()
        check_metadata(data)
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        check_sizes(metadata)
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(name, str):
                raise ValueError(f"the name {quoted(name)} is not a string")
            for chunk in entry.chunks if hasattr(entry, "chunks") else ():
                if not _same_rank(entry.size, chunk.offsets, chunk.sizes):
                    shape, size, offset = (quoted(list(n)) for n in (entry.size, chunk.sizes, chunk.offsets))
                    raise ValueError(f"{name} with the shape {shape} has a chunk of the shape {size} at {offset}")
        for index, info in metadata.storage_data.items():
            _ = Path(info.relative_path)
            if not isinstance(index.fqn, str) or not _same_rank((info.offset,), (info.length,)):
                offset = quoted(info.offset)
                length = quoted(info.length)
                raise ValueError(f"{quoted(index.fqn)} has bytes {offset} to {offset} + {length}")
        return metadata
    except DAMAGE as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read: {text}; copy the whole checkpoint again") from None


def check_sizes(content: Any) -> None:
    """``ValueError`` for containers with too many elements, or levels, for functions that read, compare or print them.

    A pickle of 700 bytes can hold a list of 2^45 elements: each list contains the next one twice.
    """
    sizes = _Sizes()
    elements, _ = sizes.size_and_height(content, 0)
    if elements > max(MOST_SHARED, 10 * sizes.stored):
        raise ValueError(
            f"it has {sizes.stored:,} elements and, counting a shared one at each use, more than {MOST_SHARED:,}"
        )


class _Sizes:
    """Counts the elements of nested containers; each container is visited once."""

    def __init__(self) -> None:
        self.stored = 0
        """Number of different elements."""
        self._known: dict[int, tuple[int, int]] = {}

    def size_and_height(self, item: Any, level: int) -> tuple[int, int]:
        """Number of elements of ``item`` at ``level``, counting a shared one at each use, and its height."""
        children = _children(item)
        if children is None:
            return 1, 0
        if id(item) not in self._known:
            if level > DEEPEST:  # also a container inside itself
                raise ValueError(f"it has containers inside more than {DEEPEST} others")
            size = 1
            height = 0
            for child in children:
                child_size, child_height = self.size_and_height(child, level + 1)
                size += child_size
                height = max(height, child_height)
                self.stored += 1
            self._known[id(item)] = size, height + 1
        size, height = self._known[id(item)]
        if level + height > DEEPEST:
            raise ValueError(f"it has containers inside more than {DEEPEST} others")
        return size, height


def _children(item: Any) -> Iterable[Any] | None:
    """The elements of a container or a record; None for anything else."""
    if isinstance(item, dict):
        return chain.from_iterable(item.items())
    if isinstance(item, list | tuple | set | frozenset):
        return item
    is_record = isinstance(item, Inert) or type(item).__module__.startswith("torch.distributed.checkpoint")
    return vars(item).values() if is_record and hasattr(item, "__dict__") and not isinstance(item, Enum) else None


def _same_rank(*lists: Sequence[Any]) -> bool:
    """Whether all are lists of as many integers, none of which is negative."""
    numbers = [number for numbers_of_list in lists for number in numbers_of_list]
    return len({len(numbers_of_list) for numbers_of_list in lists}) == 1 and all(
        isinstance(n, int) and n >= 0 for n in numbers
    )


class _MetadataUnpickler(pickle.Unpickler):
    """Creates only the records of ``METADATA``."""

    def find_class(self, module: str, name: str) -> Any:
        if name in METADATA.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        if module.split(".")[0] == "pathlib" or name in PLANS.get(module, ()):
            return Inert
        raise CheckpointError(
            f"the metadata names the Python object {module}.{name}, which is not allowed in a checkpoint"
        )


LARGEST_TUPLE = 2**24
"""Largest number of elements of a tuple, counting a shared one at each use; Python hashes them in 0.5 s."""
PICKLES_BEFORE_1_6 = 5
"""Pickles at the beginning of a file of torch before 1.6, which is not an archive."""
WITH_SIZE = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX"}
"""Opcodes that make a tuple, or an object that may be hashed by the elements of its arguments."""
PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
GETS = {"GET", "BINGET", "LONG_BINGET"}


class _Effect(NamedTuple):
    """Change of the stack by an opcode."""

    to_mark: bool
    """Whether it takes all objects above the last mark."""
    taken: int
    """Number of further objects that it takes."""
    pushed: int
    has_size: bool


def _effect(opcode: pickletools.OpcodeInfo) -> _Effect:
    before = list(opcode.stack_before)
    mark = pickletools.markobject
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
