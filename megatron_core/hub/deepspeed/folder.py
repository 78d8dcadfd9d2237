"""The files of a DeepSpeed checkpoint: their names, whether all are there, and their content."""

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm.pickles import INERT, load_tensors
from megatron_core.text_file import refuse_pipe

MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
LAYER = re.compile(r"layer_(\d{1,6})-(?:model_(\d{1,6})[-_])?model_states\.pt")
EXPERT = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
LATEST = ("latest", "latest_universal")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint with a folder for each parameter."""
ALLOWED = re.compile(rf"{INERT.pattern}|deepspeed(\.\w+)+|datetime\.\w+|uuid\.UUID")
"""Names of Python objects in these files that are replaced by records without behaviour."""
PART_BYTES = 2**24
REMEDY = "copy the whole checkpoint again"


def is_deepspeed_folder(folder: str | Path, tag: str | None = None) -> bool:
    """Whether ``folder`` is a DeepSpeed checkpoint, or holds several of them with a file ``latest``."""
    path = Path(folder)
    if tag is not None:
        return _has_files(path / tag)
    return _has_files(path) or any((path / name).is_file() for name in LATEST)


def _has_files(path: Path) -> bool:
    try:
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    except OSError:
        return False
    return any(pattern.fullmatch(name) for pattern in (MODEL, OPTIMIZER) for name in names)


def latest_tag(folder: Path) -> str | None:
    """Return the tag in the file ``latest``; None if the file does not exist. Errors: ``CheckpointError``."""
    path = next((folder / name for name in LATEST if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        tag = path.read_bytes()[:1000].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if tag in ("", ".", "..") or not tag.isprintable() or set(tag) & set("/\\"):
        raise CheckpointError(f"{path} says {tag[:40]!r}; it must be the name of a folder next to it")
    return tag


def find_folder(folder: Path, tag: str | None) -> Path:
    """Return the folder of ``tag``, by default the latest; ``folder`` itself if it has the files of a checkpoint."""
    if tag is None and _has_files(folder):
        return folder
    tag = latest_tag(folder) if tag is None else tag
    if tag is None:
        raise CheckpointError(f"{folder} is not a checkpoint of DeepSpeed: it has neither latest nor *_states.pt")
    if not _has_files(folder / tag):
        raise CheckpointError(f"{folder / tag} has no *_states.pt of DeepSpeed; give the folder or tag of a checkpoint")
    return folder / tag


@dataclass
class Files:
    """The files of one checkpoint by rank; ranks count from 0 without a gap."""

    folder: Path
    model: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(data-parallel rank, model-parallel rank) -> file; the first is 0 for files that all ranks share."""
    optimizer: dict[tuple[int, int], Path] = field(default_factory=dict)
    layers: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(layer of a pipeline, tensor-parallel rank) -> file."""
    parameters: Path | None = None
    """The folder of a universal checkpoint with a folder for each parameter."""

    @classmethod
    def of(cls, folder: Path) -> "Files":
        """List the files. Errors: ``CheckpointError`` if one of a rank is missing."""
        listing = cls(folder)
        try:
            paths = sorted(folder.iterdir())
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from None
        for path in paths:
            if EXPERT.fullmatch(path.name):
                raise CheckpointError(f"{path}: checkpoints of DeepSpeed's mixture of experts are not supported")
            for pattern, files in ((MODEL, listing.model), (OPTIMIZER, listing.optimizer), (LAYER, listing.layers)):
                match = pattern.fullmatch(path.name)
                if match is None:
                    continue
                rank = int(match[1] or 0), int(match[2] or 0)
                if rank in files:
                    raise CheckpointError(f"{folder} has both {files[rank].name} and {path.name}: files of two saves")
                files[rank] = path
        if (folder / UNIVERSAL).is_dir():
            listing.parameters = folder / UNIVERSAL
        if not listing.model:
            raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt; {REMEDY}")
        for role in ("model", "optimizer"):
            _check_grid(folder, getattr(listing, role), role)
        models = {mp for _, mp in listing.model}
        of_stage3 = any(path.name.startswith("zero_pp") for path in listing.model.values())
        if listing.optimizer and of_stage3 and listing.model.keys() != listing.optimizer.keys():
            raise CheckpointError(
                f"{folder} has {len(listing.model)} *_model_states.pt and {len(listing.optimizer)} *_optim_states.pt "
                f"of ZeRO 3: a file is missing, or files of two runs are mixed; {REMEDY}"
            )
        if listing.optimizer and {mp for _, mp in listing.optimizer} != models:
            raise CheckpointError(
                f"{folder} has *_model_states.pt of {len(models)} model-parallel ranks and *_optim_states.pt of "
                f"{len({mp for _, mp in listing.optimizer})}; {REMEDY}"
            )
        return listing

    @property
    def tensor_files(self) -> list[Path]:
        """All files that may be read."""
        inner = [] if self.parameters is None else sorted(self.parameters.rglob("*.pt"))
        return [*self.model.values(), *self.optimizer.values(), *self.layers.values(), *inner]

    def damaged(self, share: int = 0, shares: int = 1) -> Iterator[str]:
        """Yield the faults of part ``share`` of ``shares`` of the files, by the checksums that torch stores."""
        for path in self.tensor_files[share::shares]:
            fault = _damage(path)
            if fault:
                yield f"{path} is damaged: {fault}; {REMEDY}"


def _check_grid(folder: Path, files: Mapping[tuple[int, int], Path], role: str) -> None:
    """Raise ``CheckpointError`` unless there is a file for each pair of ranks."""
    if not files:
        return
    sizes = [max(rank[axis] for rank in files) + 1 for axis in (0, 1)]
    if len(files) < sizes[0] * sizes[1]:
        absent = next((d, m) for m in range(sizes[1]) for d in range(sizes[0]) if (d, m) not in files)
        raise CheckpointError(
            f"{folder} has no {role} file of data-parallel rank {absent[0]} and model-parallel rank {absent[1]}, but "
            f"files of higher ranks; {REMEDY}"
        )


def _damage(path: Path) -> str:
    """Compare the records of a file with their checksums; return the fault or ""."""
    try:
        refuse_pipe(path)
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    return f"{record.filename} is compressed"
                with archive.open(record) as stream:  # it compares the checksum at the end
                    while stream.read(PART_BYTES):
                        pass
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    except (IndexError, KeyError, OverflowError, UnicodeDecodeError, zlib.error) as error:
        return f"not a file of torch.save ({error})"
    return ""


def load_dict(path: Path) -> dict[Any, Any]:
    """Read a file that must contain a dict, without running code. Errors: ``CheckpointError``."""
    content = load_tensors(path, ALLOWED)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}; it must contain a dict")
    return content
