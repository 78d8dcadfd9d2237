"""``read_deepspeed_checkpoint``: whole weights, optimizer state and counters of a DeepSpeed checkpoint by name."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.deepspeed.folder import Files, find_folder, load_dict
from megatron_core.hub.deepspeed.model_files import ModelFile, plain_content
from megatron_core.hub.deepspeed.plain_states import Order, PlainStates
from megatron_core.hub.deepspeed.shards import Parts, Stored, read_partitions, read_universal, shapes_of, whole_number
from megatron_core.training.state import TrainState

T = TypeVar("T")
LATER = "@stage"
"""Follows the names of copies of a tied layer on later stages, while they are read."""
NEWEST = "0.19"
"""The newest release of DeepSpeed whose files were compared."""
DAMAGE = (
    *(TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError),
    *(OverflowError, RecursionError, MemoryError, OSError),
)
"""Errors of code that reads a file whose structure is not the expected one."""


def read_deepspeed_checkpoint(
    folder: str | Path, tag: str | None = None, *, verify: bool = True
) -> "DeepSpeedCheckpoint":
    """Open a checkpoint of DeepSpeed 0.19 or of an older release with the same layout; no pickled code is run.

    ``folder``: the folder that training gave to ``save_checkpoint``, with ``tag`` or the latest one, or the folder of
    one checkpoint. ZeRO 0 to 3, offload, pipelines, tensor parallelism of AutoTP, and the universal format. ``verify``:
    compare the files with their checksums first. Errors: ``CheckpointError``.
    """
    checkpoint = DeepSpeedCheckpoint(find_folder(Path(folder), tag))
    if verify:
        for fault in checkpoint.damaged():
            raise CheckpointError(fault)
    checkpoint.open()
    return checkpoint


class DeepSpeedCheckpoint:
    """A DeepSpeed checkpoint; tensors are float32, whole, on the CPU, and assembled when they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Files.of(folder)
        self.damaged = self._files.damaged

    def open(self) -> None:
        """Read the structure of all files; without it, nothing else works."""
        self._guarded(self._open)

    def _guarded(self, action: Callable[[], T]) -> T:
        """Run ``action``; faults of the files become ``CheckpointError`` with the folder and the release."""
        try:
            return action()
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(text if str(self.folder) in text else f"{self.folder}: {text}") from None
        except DAMAGE as error:
            release = getattr(self, "release", "unknown")
            detail = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{self.folder} (DeepSpeed {release}) does not have the structure of DeepSpeed {NEWEST}: "
                f"{type(error).__name__}: {detail}; the files are damaged or of another release"
            ) from None

    def _open(self) -> None:
        # Model files: one for each model-parallel rank, in ZeRO 3 one for each rank.
        models = {rank: ModelFile(path) for rank, path in self._files.model.items()}
        first = models[0, 0]
        self.release = first.release
        self.counters = first.counters
        self.client_state = first.client_state
        self.lr_scheduler = first.lr_scheduler
        self.config = first.config
        for model in models.values():
            model.check_same_save(first)
        stages = max(mp for _, mp in models) + 1
        self._tp, self._pp = first.sizes(stages, {rank for _, rank in self._files.layers})
        self._joiner = Joiner(self._info(first), 1 if self._files.parameters else self._tp)
        # Optimizer files.
        self._content = {rank: load_dict(path) for rank, path in self._files.optimizer.items()}
        self._optimizer: Mapping[str, Any] = {}
        self._plain: PlainStates | None = None
        untrained: dict[str, Stored] = {}
        if self._files.parameters is not None:
            shapes = {name: shape for model in models.values() for name, shape in model.all_shapes().items()}
            trained, untrained, self._optimizer = read_universal(self._files.parameters, shapes)
        elif self._content:
            trained = self._joiner.parts([self._stages(models, rank) for rank in range(self._tp)])
            self._optimizer = self._inner(0, 0)
        else:
            if first.param_shapes is not None:  # ZeRO has the weights in other files
                raise CheckpointError("there are no *_optim_states.pt, which have the weights of ZeRO; copy them too")
            trained = Parts()
            if isinstance(first.optimizer, Mapping):
                self._optimizer = first.optimizer
                self._plain = PlainStates(first.optimizer, first.module)
        self._parts = trained
        # Weights by name, in the order of the module.
        self.shared = dict(first.shared)
        self.buffers = {name: first.module[name] for name in first.buffer_names if name in first.module}
        self._weights = self._all_weights(models, untrained)

    def _info(self, first: ModelFile) -> Any:
        """How parts of tensor-parallel ranks are joined."""
        info = first.universal
        version = info.get("universal_checkpoint_version", 0.0) if isinstance(info, Mapping) else 0.0
        if not isinstance(version, int | float) or version > UNIVERSAL_VERSION:
            raise CheckpointError(
                f"universal_checkpoint_version is {quoted(version)}; versions up to {UNIVERSAL_VERSION} are read"
            )
        return info

    def _inner(self, dp: int, mp: int) -> Mapping[str, Any]:
        state = self._content[dp, mp].get("optimizer_state_dict")
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{self._files.optimizer[dp, mp]} has no optimizer_state_dict; it must be a dict")
        return state

    def _stages(self, models: Mapping[tuple[int, int], ModelFile], tp: int) -> Parts:
        """Weights and state of a tensor-parallel rank on all pipeline stages."""
        joined = Parts()
        size = max(dp for dp, _ in self._content) + 1
        for stage in range(self._pp):
            mp = stage * self._tp + tp
            shapes = shapes_of(models[0, mp].param_shapes)
            of_stage = read_partitions([self._inner(dp, mp) for dp in range(size)], shapes)
            # A tied layer exists on several stages under one name, but only some of its parameters are equal.
            names = {name: f"{name}{LATER}{stage}" if name in joined.main else name for name in of_stage.main}
            joined.main |= {names[name]: value for name, value in of_stage.main.items()}
            for state_kind, states in of_stage.states.items():
                joined.states.setdefault(state_kind, {}).update({names[name]: value for name, value in states.items()})
            joined.steps |= of_stage.steps
            joined.groups = joined.groups or of_stage.groups
        return joined

    def _all_weights(
        self, models: Mapping[tuple[int, int], ModelFile], untrained: Mapping[str, Stored]
    ) -> dict[str, Stored]:
        """All parameters by name: the optimizer's weights, the frozen ones, and other names of both."""
        by_rank = [models[0, rank].stored_weights(self._data_ranks(models, rank)) for rank in range(self._tp)]
        for (layer, rank), path in self._files.layers.items():
            entries = load_dict(path).items()
            by_rank[rank] |= {f"{layer}.{n}": Stored.of(t) for n, t in entries if isinstance(t, Tensor)}
        stored = self._joiner.tensors(by_rank) | dict(untrained)
        aliases = self._tied_layers(stored)
        main = self._parts.main
        known = {**stored, **main}
        order = dict.fromkeys((*models[0, 0].module, *known))
        weights = {name: known[name] for name in order if name in known and name not in self.buffers}
        aliases |= models[0, 0].aliases(weights)
        for other, name in (*aliases.items(), *self.shared.items()):
            if name in weights and other not in main:
                weights[other] = weights[name]
                self.shared[other] = name
        return weights

    @staticmethod
    def _data_ranks(models: Mapping[tuple[int, int], ModelFile], mp: int) -> list[ModelFile]:
        return [models[rank] for rank in sorted(models) if rank[1] == mp]

    def _tied_layers(self, stored: Mapping[str, Stored]) -> dict[str, str]:
        """Weights of tied layers of a pipeline -> the names under which the optimizer has them.

        Copies of a tied layer on later stages get the names of their layers where their values differ.
        """
        main = self._parts.main
        states = self._parts.states
        aliases = {}
        tied = [name for name in main if name.startswith("tied_modules.")]
        for name in [name for name in stored if tied and name not in main]:
            weight = stored[name].read()
            for other in tied:
                path = other.split(".", 2)[2].partition(LATER)[0]
                is_equal = path == name.partition(".")[2] and main[other].shape == weight.shape
                if is_equal and torch.equal(main[other].read().to(weight.dtype), weight):
                    if LATER not in other:
                        aliases[name] = other
                    else:
                        main[name] = main[other]
                        for tensors in states.values():
                            tensors |= {name: tensors[other]} if other in tensors else {}
                    break
        for name in [name for name in tied if LATER in name]:
            for table in (main, *states.values()):
                table.pop(name, None)
        return aliases

    # What a caller reads.

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that the optimizer updates; empty without its state."""
        return {name for states in (self._parts.main, *self._parts.states.values()) for name in states}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters by name, frozen ones and second names of tied ones included."""
        return {name: value.shape for name, value in self._weights.items()}

    def weight(self, name: str) -> Tensor:
        """Return a parameter; errors: ``CheckpointError`` if there is none of this name."""
        if name not in self._weights:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._guarded(self._weights[name].read)

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by name; tied ones are the same tensor."""
        tensors = {name: self.weight(name) for name in self._weights if name not in self.shared}
        return {name: tensors.get(name, tensors.get(self.shared.get(name, ""))) for name in self._weights}  # type: ignore[misc]

    def name_states(self, orders: Iterable[Order]) -> None:
        """Give names to the optimizer state of a checkpoint without ZeRO; no effect on others.

        ``orders``: names of the parameters of each group of the optimizer, the most probable first.
        """
        if self._plain is not None:
            states = self._plain
            named = self._guarded(lambda: states.named(orders))
            self._plain = None
            self._parts = named
            self._weights |= {name: value for name, value in named.main.items() if name in self._weights}
            for other, name in self.shared.items():
                self._weights[other] = self._weights.get(name, self._weights[other])

    @property
    def states(self) -> Mapping[str, Mapping[str, Stored]]:
        """The optimizer's state: kind, such as exp_avg -> parameter -> tensor."""
        if self._plain is not None:
            trained = [name for name in self._weights if name not in self.shared]
            self.name_states([[trained]])
        return self._parts.states

    def state(self, name: str, state_kind: str) -> Tensor:
        """Return the state ``state_kind`` of a parameter."""
        name = self.shared.get(name, name)
        if name not in self.states.get(state_kind, {}):
            raise CheckpointError(f"{self.folder} has no {state_kind} of {name}; load only the weights")
        return self._guarded(self.states[state_kind][name].read)

    @property
    def optimizer_steps(self) -> int:
        """Number of updates, for Adam's bias correction. Errors: ``CheckpointError`` if parameters differ."""
        _ = self.states
        steps = self._parts.steps or {self.counters["global_steps"] - self.counters["skipped_steps"]}
        if len(steps) > 1:
            raise CheckpointError(
                f"{self.folder}: parameters had {', '.join(map(str, sorted(steps)))} updates: files of two saves are "
                "mixed, or some parameters were not trained in each step; load only the weights"
            )
        return next(iter(steps))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Settings of the parameter groups, such as lr and weight_decay."""
        return [plain_content(group) for group in (self._plain or self._parts).groups]

    @cached_property
    def loss_scale(self) -> dict[str, float]:
        """State of a dynamic loss scale: scale, and numbers of good steps and of overflows left; empty without one."""
        state = self._optimizer
        scaler = getattr(state.get("loss_scaler"), "arguments", None)
        values = scaler if isinstance(scaler, Mapping) else state
        if not (values.get("dynamic") or values.get("dynamic_loss_scale")):
            return {}
        scale = values.get("cur_scale")
        window = whole_number(values.get("scale_window")) or 1000
        if not isinstance(scale, int | float) or not 0 < scale < 1e30:
            raise CheckpointError(f"{self.folder}: the loss scale is {quoted(scale)}; it must be above 0")
        step = values.get("cur_iter", 0)
        last_overflow = values.get("last_overflow_iter", -1)
        good = step - last_overflow - 1 if isinstance(step, int) and isinstance(last_overflow, int) else 0
        chances = whole_number(values.get("cur_hysteresis")) or 1
        # DeepSpeed does not count the first good step: its scale grows in the step after ``window`` good steps.
        tracker = (good - 1) % window if good > 0 else -1
        return {"scale": float(scale), "growth_tracker": tracker, "hysteresis_tracker": chances}


def train_state(checkpoint: DeepSpeedCheckpoint) -> TrainState:
    """The counters of the training."""
    counts = checkpoint.counters
    steps, samples, skipped = (counts[name] for name in ("global_steps", "global_samples", "skipped_steps"))
    per_step = samples // steps if steps else 0
    return TrainState(steps, samples, skipped_iterations=skipped, skipped_samples=skipped * per_step)


UNIVERSAL_VERSION = 0.4
"""The newest version of ``universal_checkpoint_info`` that is understood."""
KINDS = {
    "tp_replicated_parameter_patterns": "first",
    "parameter_to_average_patterns": "mean",
    "parameter_with_row_parallelism_patterns": "columns",
    "vocabulary_parameter_patterns": "rows",
    "parameter_with_2_sub_params_cat_dim_0": "halves",
}
"""Lists of patterns of parameter names -> how their parts are joined; other parameters are joined by rows."""
LONGEST = 300
MOST_REPEATS = 4
"""Bounds of a pattern, with which a match takes little time."""
CONVERT = "convert it with DeepSpeed's ds_to_universal, whose result is read"


class Joiner:
    """Joins parts of ``size`` tensor-parallel ranks. Errors: ``CheckpointError`` without rules or for unknown ones."""

    def __init__(self, info: Any, size: int) -> None:
        self.size = size
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        if size == 1:
            return
        if not isinstance(info, Mapping) or not info:
            raise CheckpointError(
                f"the checkpoint has {size} tensor-parallel ranks, but no universal_checkpoint_info, which says how "
                "their parts are joined; save it with DeepSpeed's AutoTP, or gather the weights in the training program"
            )
        if info.get("parameter_with_sub_params"):
            raise CheckpointError(f"the checkpoint has tensor-parallel parameters of several parts; {CONVERT}")
        for name, method in KINDS.items():
            listed = info.get(name) or []
            if not isinstance(listed, list):
                raise CheckpointError(f"universal_checkpoint_info: {name} must be a list of patterns")
            self._patterns += [(compiled(pattern), method) for pattern in listed]

    def parts(self, ranks: Sequence[Parts]) -> Parts:
        """Join weights and state of all ranks."""
        first = ranks[0]
        joined = Parts(self.tensors([rank.main for rank in ranks]), {}, set(), first.groups)
        for state_kind in first.states:
            joined.states[state_kind] = self.tensors([rank.states.get(state_kind, {}) for rank in ranks])
        for rank in ranks:
            joined.steps |= rank.steps
        return joined

    def tensors(self, ranks: Sequence[Mapping[str, Stored]]) -> dict[str, Stored]:
        """Join tensors by name."""
        if self.size == 1:
            return dict(ranks[0])
        for rank in ranks[1:]:
            if rank.keys() != ranks[0].keys():
                other = sorted(rank.keys() ^ ranks[0].keys())
                raise CheckpointError(f"only some tensor-parallel ranks have {other[0]}: files of two runs are mixed")
        return {name: self._joined(name, [rank[name] for rank in ranks]) for name in ranks[0]}

    def _joined(self, name: str, shards: Sequence[Stored]) -> Stored:
        method = next((method for pattern, method in self._patterns if pattern.match(name)), "rows")
        if method in ("first", "mean"):
            if any(shard.shape != shards[0].shape for shard in shards):
                raise CheckpointError(f"{name} has different shapes on tensor-parallel ranks, but is not split")
            if method == "first":
                return shards[0]
            return Stored(shards[0].shape, lambda: torch.stack([shard.read() for shard in shards]).mean(0))
        axis = 1 if method == "columns" and len(shards[0].shape) > 1 else 0
        if any(not shard.shape or _others(shard, axis) != _others(shards[0], axis) for shard in shards):
            raise CheckpointError(f"{name} has shapes on tensor-parallel ranks that do not fit together")
        shape = list(shards[0].shape)
        shape[axis] = sum(shard.shape[axis] for shard in shards)
        return Stored(tuple(shape), _reader(shards, axis, halves=method == "halves"))


def _others(shard: Stored, axis: int) -> tuple[int, ...]:
    return shard.shape[:axis] + shard.shape[axis + 1 :]


def _reader(shards: Sequence[Stored], axis: int, *, halves: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensors = [shard.read() for shard in shards]
        if not halves:
            return torch.cat(tensors, axis)
        pairs = [tensor.chunk(2) for tensor in tensors]
        return torch.cat([torch.cat([pair[half] for pair in pairs]) for half in (0, 1)])

    return read


def compiled(pattern: Any) -> re.Pattern[str]:
    """A pattern of a file; those that could take long are refused."""
    text = pattern if isinstance(pattern, str) else ""
    unescaped = re.sub(r"\\.", "", text)
    if not text or len(text) > LONGEST or set(unescaped) & set("({") or sum(map(unescaped.count, "*+?")) > MOST_REPEATS:
        raise CheckpointError(f"universal_checkpoint_info has the pattern {quoted(pattern)}; {CONVERT}")
    try:
        return re.compile(text)
    except re.error:
        raise CheckpointError(f"universal_checkpoint_info has the invalid pattern {text[:60]!r}") from None
