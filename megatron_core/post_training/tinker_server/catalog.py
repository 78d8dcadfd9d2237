"""Descriptions of the runs and checkpoints below ``--save``, also of earlier servers, as Tinker's API lists them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_core.checkpoint.folder import complete_iterations, iteration_folder
from megatron_core.checkpoint.manifest import MANIFEST, Manifest
from megatron_core.errors import DataError
from megatron_core.locations import location
from megatron_core.post_training.tinker_server.bodies import NAME, WeightsInfo, checked_path, read_body

STATE = "tinker"
"""Name of the description of a training in the state of its checkpoints."""
NOTE = "tinker_note"
"""Name of the time and the user's remarks in the state of a checkpoint."""
TYPES = {"weights": "training", "sampler_weights": "sampler"}
MOST_ENTRIES = 1000
"""Largest number of entries of one answer."""
_RUN_FOLDER = re.compile("([0-9a-f]+)-train-([0-9]+)")
Json = dict[str, Any]


def present_time() -> str:
    """The present time in ISO format."""
    return datetime.now(timezone.utc).isoformat()


class NotFoundError(DataError):
    """A session, training, sampler or checkpoint that this server does not know."""


def folder_of(save: str | None, path: str) -> Path:
    """The folder of ``tinker://RUN/KIND/NAME`` below ``save``; the parts have been checked."""
    if save is None:
        raise DataError("this server has no folder for weights; start it with --save FOLDER")
    run, kind, name = path.removeprefix("tinker://").split("/")
    return location(save) / run.replace(":", "-") / kind / name


@dataclass(frozen=True)
class RunWeights:
    """The weights ``tinker://RUN/KIND/NAME`` with their manifest."""

    run: str
    kind: str
    name: str
    manifest_path: Path

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest. Errors: ``CheckpointError`` if it is damaged."""
        return Manifest.read(self.manifest_path)

    @property
    def path(self) -> str:
        """The path in requests."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def adaptation(self) -> Json:
        """The fields of the training's ``Adaptation``."""
        return dict(self.manifest.state[STATE])

    @property
    def time(self) -> str:
        """When it was saved, in ISO format."""
        return str(self.manifest.state[NOTE]["time"])

    def description(self) -> Json:
        """The checkpoint in Tinker's API."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": TYPES[self.kind],
            "time": self.time,
            "tinker_path": self.path,
            "size_bytes": sum(file.size for file in self.manifest.files.values()),
            "user_metadata": self.manifest.state[NOTE]["user_metadata"],
        }


class Catalog:
    """The runs of a server: those of open trainings, and those with weights below ``save``.

    Methods receive the names in a request's path and its query. Errors: ``DataError``, ``NotFoundError``.
    """

    def __init__(self, save: str | None, base_model: str) -> None:
        self._save = save
        self._base_model = base_model
        self.open_runs: dict[str, Json] = {}
        """The fields of ``Adaptation`` and the ``time`` of the last request, by training."""

    def run(self, query: Mapping[str, str]) -> Json:
        """A run."""
        name = query["run"]
        stored = self.stored(name)
        if not stored and name not in self.open_runs:
            raise NotFoundError(f"run {name!r} is not open, and has no weights on this server")
        return self._describe(name, stored)

    def runs(self, query: Mapping[str, str]) -> Json:
        """All runs, the latest first."""
        by_run: dict[str, list[RunWeights]] = {name: [] for name in self.open_runs}
        for weights in self.stored():
            by_run.setdefault(weights.run, []).append(weights)
        runs = [self._describe(name, stored) for name, stored in by_run.items()]
        return entries_of_page(
            "training_runs", sorted(runs, key=lambda run: run["last_request_time"], reverse=True), query
        )

    def checkpoints(self, query: Mapping[str, str]) -> Json:
        """The checkpoints of all runs, or all of one run, newest first."""
        descriptions = [weights.description() for weights in self.stored(query.get("run"))]
        return {"checkpoints": descriptions} if "run" in query else entries_of_page("checkpoints", descriptions, query)

    def weights_info(self, body: bytes) -> Json:
        """Return the settings with which weights can be loaded."""
        adaptation = self.find(checked_path(read_body(WeightsInfo, body).tinker_path)).adaptation
        described = {name: adaptation[name] for name in ("train_mlp", "train_attn")} if adaptation["rank"] else {}
        return {
            "base_model": self._base_model,
            "is_lora": adaptation["rank"] > 0,
            "lora_rank": adaptation["rank"] or None,
            **described,
        }

    def find(self, path: str) -> RunWeights:
        """The weights of a path whose form has been checked."""
        for weights in self.stored(path.removeprefix("tinker://").split("/")[0]):
            if weights.path == path:
                return weights
        raise NotFoundError(f"no weights are stored at {path}")

    def stored(self, run: str | None = None) -> list[RunWeights]:
        """All weights below ``save``, or those of one run, newest first."""
        return sorted(_stored(self._save, run), key=lambda weights: weights.time, reverse=True)

    def _describe(self, name: str, stored: Sequence[RunWeights]) -> Json:
        """A run in Tinker's API, from its training if that is open, and its weights, newest first."""
        facts = self.open_runs.get(name) or {"time": stored[0].time, **stored[0].adaptation}
        latest: Json = {}
        for weights in reversed(stored):
            key = "last_checkpoint" if weights.kind == "weights" else "last_sampler_checkpoint"
            latest[key] = weights.description()
        return {
            "training_run_id": name,
            "base_model": self._base_model,
            "model_owner": "local",
            "is_lora": facts["rank"] > 0,
            "lora_rank": facts["rank"] or None,
            "last_request_time": facts["time"],
            "user_metadata": facts["user_metadata"],
            **latest,
        }


def _stored(save: str | None, run: str | None) -> Iterator[RunWeights]:
    root = location(save) if save is not None else None
    if root is None or not root.is_dir():
        return
    for folder in root.iterdir():
        matched = _RUN_FOLDER.fullmatch(folder.name)
        if matched is None or run not in (None, f"{matched[1]}:train:{matched[2]}"):
            continue
        for kind in TYPES:
            names = sorted((folder / kind).iterdir()) if (folder / kind).is_dir() else []
            for weights in names:
                iterations = complete_iterations(weights) if NAME.fullmatch(weights.name) else []
                if iterations:
                    path = iteration_folder(weights, iterations[-1]) / MANIFEST
                    yield RunWeights(f"{matched[1]}:train:{matched[2]}", kind, weights.name, path)


def entries_of_page(name: str, entries: Sequence[Any], query: Mapping[str, str]) -> Json:
    """The entries from ``offset`` on, at most ``limit``, under ``name``, and the cursor that describes them."""
    numbers = {"offset": query.get("offset", "0"), "limit": query.get("limit", "20")}
    if not all(value.isascii() and value.isdigit() and len(value) < 10 for value in numbers.values()):
        raise DataError(f"offset={numbers['offset']!r} and limit={numbers['limit']!r} must be numbers from 0 on")
    offset = int(numbers["offset"])
    limit = min(int(numbers["limit"]), MOST_ENTRIES)
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return {name: list(entries[offset : offset + limit]), "cursor": cursor}
