"""Read Megatron-LM's pickles without executing code that they name.

``torch.load`` with ``weights_only`` creates tensors and plain containers only. Other objects that Megatron-LM stores
(its arguments, states of random generators) become inert objects; any other name is refused.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_core.errors import CheckpointError
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
    shown = source if isinstance(source, Path) else name
    try:
        if isinstance(source, Path):
            refuse_pipe(source)
        file: Any = str(source) if isinstance(source, Path) else io.BytesIO(source)
        # In a file of torch before 1.6, which is not an archive, torch.load itself refuses all names.
        archive = zipfile.is_zipfile(source if isinstance(source, Path) else io.BytesIO(source))
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if archive else []
        refused = [name for name in names if not inert.fullmatch(name)]
        if refused:
            raise CheckpointError(
                f"{shown} names the Python object {refused[0]}, which is not allowed in a checkpoint; save the "
                "checkpoint without it"
            )
        if not isinstance(source, Path):
            file.seek(0)
        stand_ins: list[Any] = [(type("Inert", (Inert,), {}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            mapped = archive and isinstance(source, Path)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except DAMAGE as error:
        text = (str(error).splitlines() or [""])[0].split(". ")[0] or type(error).__name__
        raise CheckpointError(f"{shown} cannot be read: {text}; copy the whole checkpoint again") from None


def load_metadata(path: Path) -> Any:
    """Load the ``.metadata`` of ``torch.distributed.checkpoint``. Errors: as ``load_tensors``."""
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        for name, entry in found.state_dict_metadata.items():
            if not isinstance(name, str):
                raise ValueError(f"the name {name!r} is not a string")
            for chunk in entry.chunks if hasattr(entry, "chunks") else ():
                if not _same_rank(entry.size, chunk.offsets, chunk.sizes):
                    raise ValueError(
                        f"{name} with the shape {list(entry.size)} has a chunk of the shape {list(chunk.sizes)} at "
                        f"{list(chunk.offsets)}"
                    )
        for index, info in found.storage_data.items():
            _ = Path(info.relative_path)
            if not isinstance(index.fqn, str) or not _same_rank((info.offset,), (info.length,)):
                raise ValueError(f"{index.fqn!r} has bytes {info.offset} to {info.offset} + {info.length}")
        return found
    except DAMAGE as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read: {text}; copy the whole checkpoint again") from None


def _same_rank(*lists: Sequence[Any]) -> bool:
    """Whether all are lists of as many integers, none of which is negative."""
    numbers = [number for each in lists for number in each]
    return len({len(each) for each in lists}) == 1 and all(isinstance(n, int) and n >= 0 for n in numbers)


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
