"""``*_model_states.pt``: the module, the names and shapes of the optimizer's tensors, and the counters."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.deepspeed.folder import load_dict
from megatron_core.hub.deepspeed.shards import Flat, Shape, Stored, memory_key, shape_of, shapes_of, whole_number

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts"),
    *("sparse_tensor_module_names", "csr_tensor_module_names", "ds_autoep_layers", "autoep_layers", *COUNTERS),
}
"""Keys of DeepSpeed; all others are of the caller's client_state."""


class ModelFile:
    """The content of one file. Errors: ``CheckpointError`` for entries of another type."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = content = load_dict(path)
        self.release = str(content.get("ds_version", "unknown"))[:40]
        self.module: dict[str, Tensor] = {
            str(name): value for name, value in self._dict("module").items() if isinstance(value, Tensor)
        }
        self.optimizer = content.get("optimizer")
        self.param_shapes = content.get("param_shapes")
        self.universal = content.get("universal_checkpoint_info")
        names = content.get("buffer_names")
        self.buffer_names = [str(name) for name in names] if isinstance(names, list | tuple) else []
        self.shared = {str(other): str(name) for other, name in self._dict("shared_params").items()}
        self.lr_scheduler = plain_content(self._dict("lr_scheduler"))
        self.config = plain_content(content["ds_config"]) if isinstance(content.get("ds_config"), Mapping) else {}
        self.client_state = {str(n): plain_content(v) for n, v in content.items() if n not in OWN and is_plain_value(v)}
        if "ds_autoep_layers" in content or "autoep_layers" in content or content.get("num_experts"):
            raise CheckpointError(f"{path}: checkpoints of DeepSpeed's mixture of experts are not supported")

    def _dict(self, name: str) -> Mapping[Any, Any]:
        entry = self._content.get(name)
        if entry is None:
            return {}
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"{self.path}: {name} is a {type(entry).__name__}; it must be a dict")
        return entry

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of steps and samples; 0 for those that older releases do not store."""
        counts = {}
        for name in COUNTERS:
            value = self._content.get(name, 0 if name != "global_steps" else None)
            count = whole_number(value)
            if count is None:
                raise CheckpointError(f"{self.path}: {name} is {quoted(value)}; it must be a number of steps")
            counts[name] = count
        return counts

    def check_same_save(self, first: "ModelFile") -> None:
        """Raise ``CheckpointError`` if the files are of different saves or runs."""
        for name in ("global_steps", "ds_version", "dp_world_size", "mp_world_size"):
            value = self._content.get(name)
            other = first._content.get(name)
            if value != other:
                raise CheckpointError(
                    f"{self.path.name} has {name}={quoted(value)} and {first.path.name} {name}={quoted(other)}: "
                    "files of two saves are mixed; copy the whole checkpoint again"
                )

    def sizes(self, model_ranks: int, layer_ranks: set[int]) -> tuple[int, int]:
        """The sizes of tensor and pipeline parallelism of ``model_ranks`` model-parallel ranks."""
        dims = self._dict("checkpoint_parallel_dimensions")
        tp = whole_number(dims.get("tp_degree"))
        pp = whole_number(dims.get("pp_degree"))
        if not tp or not pp:
            tp = len(layer_ranks) or model_ranks
            pp = model_ranks // tp
        if tp * pp != model_ranks:
            raise CheckpointError(
                f"{self.path.parent} has files of {model_ranks} model-parallel ranks, but the run had tensor "
                f"parallelism {tp} and pipeline parallelism {pp}: files are missing"
            )
        return tp, pp

    def all_shapes(self) -> dict[str, Shape]:
        """Shapes of all trained parameters."""
        groups = [] if self.param_shapes is None else shapes_of(self.param_shapes)
        return {name: shape for group in groups for name, shape in group.items()}

    def stored_weights(self, ranks: "Sequence[ModelFile]") -> dict[str, Stored]:
        """Parameters in these files: all without ZeRO 3, the frozen ones with it; ``ranks``: its data-parallel ranks.

        With ZeRO 3 each rank has an equal part of a frozen parameter, and the module has empty tensors.
        """
        buffers = set(self.buffer_names)
        trained = self.all_shapes()
        frozen = {str(n): shape_of(s, str(n)) for n, s in self._dict("frozen_param_shapes").items()}
        weights = {}
        for name, tensor in self.module.items():
            shape = trained.get(name, frozen.get(name))
            # In a file of ZeRO 3 the module has empty tensors.
            is_whole = tensor.numel() or not self.path.name.startswith("zero_pp_rank_")
            if name not in buffers and shape in (None, tuple(tensor.shape)) and is_whole:
                weights[name] = Stored.of(tensor)
        for name, shape in frozen.items():
            if name not in weights:
                fragments = [rank._dict("frozen_param_fragments").get(name) for rank in ranks]
                weights[name] = _whole(name, shape, fragments)
        return weights

    def aliases(self, weights: Mapping[str, Stored]) -> dict[str, str]:
        """Second names of tied parameters, whose tensors share memory in the file."""
        first: dict[tuple[Any, ...], str] = {}
        second: dict[str, str] = {}
        for name, tensor in self.module.items():
            if name in weights and tensor.numel():
                other = first.setdefault(memory_key(tensor), name)
                if other != name:
                    second[name] = other
        return second


def _whole(name: str, shape: Shape, fragments: list[Any]) -> Stored:
    """A frozen parameter from the parts of all ranks, or from a whole copy."""
    if isinstance(fragments[0], Tensor) and tuple(fragments[0].shape) == shape:
        return Stored.of(fragments[0])
    flat = Flat(fragments, f"the frozen parameter {name}")
    count = prod(shape)
    if not 0 <= flat.numel - count < len(fragments):
        raise CheckpointError(
            f"the frozen parameter {name} has {flat.numel} elements in {len(fragments)} files, but its shape is "
            f"{list(shape)}: a file is missing, or files of two runs are mixed"
        )
    return flat.stored(0, shape)


def plain_content(value: Any) -> Any:
    """Return plain values of ``value``; objects in dicts and lists are left out."""
    if isinstance(value, Mapping):
        return {name: plain_content(item) for name, item in value.items() if is_plain_value(item)}
    if isinstance(value, list | tuple):
        return type(value)(plain_content(item) for item in value) if type(value) in (list, tuple) else list(value)
    return value


def is_plain_value(value: Any) -> bool:
    """Whether ``value`` consists of numbers, strings, tensors and containers."""
    if isinstance(value, list | tuple):
        return all(map(is_plain_value, value))
    return value is None or isinstance(value, Mapping | bool | int | float | str | Tensor)
