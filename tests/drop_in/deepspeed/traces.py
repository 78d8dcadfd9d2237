"""Results of DeepSpeed and the drop-in without ranks: keys, learning rates, partitions, topologies, schedules."""

from __future__ import annotations

import argparse
import inspect
import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

# Keys.


def fields() -> tuple[list[str], list[str]]:
    """Paths of all fields of DeepSpeed's configuration classes, and the keys that its functions read."""
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    classes = {
        "zero_optimization.": DeepSpeedZeroConfig,
        "": DeepSpeedMonitorConfig,
        "bf16.": DeepSpeedBF16Config,
        "fp16.": DeepSpeedFP16Config,
        "hybrid_engine.": config.HybridEngineConfig,
        "compile.": config.CompileConfig,
    }
    readers = [each for name, each in vars(config).items() if name.startswith("get_") and inspect.isfunction(each)]
    source = "".join(map(inspect.getsource, [config.DeepSpeedConfig, *readers]))
    read = {name: value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)}
    words = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*(\w+)", source))
    found = [path for above, kind in classes.items() for path in _paths(kind, above)]
    return found, sorted(read[name] for name in words if name in read)


def _paths(kind: Any, above: str) -> list[str]:
    from pydantic import BaseModel

    found: list[str] = []
    for own, one in kind.model_fields.items():
        kinds = (one.annotation, *getattr(one.annotation, "__args__", ()))
        inner = [each for each in kinds if inspect.isclass(each) and issubclass(each, BaseModel)]
        for name in {own, one.alias or own}:
            found += _paths(inner[0], f"{above}{name}.") if inner else [above + name]
    return found


# Learning rates.


def rates(cases: list[Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Rates and betas of 26 steps of each schedule, and defaults and values of the command-line arguments."""
    from deepspeed.runtime import lr_schedules

    rows = [_rates_of(getattr(lr_schedules, kind), params) for kind, params in cases]
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    arguments = [["--lr_schedule", kind] for kind, _ in cases]
    configs = {each[1]: lr_schedules.get_config_from_args(parser.parse_args(each)) for each in arguments}
    return rows, vars(parser.parse_args([])), configs


def _rates_of(kind: Any, params: dict[str, Any]) -> list[Any]:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.3, 0.2)]
    optimizer = torch.optim.AdamW(groups)
    schedule = kind(optimizer, **params)
    found = []
    for _ in range(26):
        found.append([[group["lr"], *group["betas"]] for group in optimizer.param_groups])
        schedule.step()
    return found


# Pipelines.


def pipelines(is_drop_in: bool) -> list[Any]:
    """Instructions of the schedules, coordinates of the topologies, and boundaries of the partitions."""
    from deepspeed.runtime.pipe import module, schedule, topology

    found: list[Any] = []
    for kind in (schedule.TrainSchedule, schedule.InferenceSchedule, schedule.DataParallelSchedule):
        for micros, stages in ((1, 1), (3, 1), (4, 2), (2, 3), (5, 4)):
            for stage in range(stages):
                one = kind(micro_batches=micros, stages=stages, stage_id=stage)
                found.append([[one.num_pipe_buffers(), one.is_last_stage], [list(map(repr, step)) for step in one]])
    for name, extents in (("PipeDataParallelTopology", (2, 3)), ("PipeModelDataParallelTopology", (2, 2, 2))):
        grid = getattr(topology, name)(*extents)
        coordinates = [list(grid.get_coord(rank)) for rank in range(grid.world_size())]
        lists = [grid.get_axis_comm_lists(axis) for axis in (*grid.get_axis_names(), "other")]
        texts = [grid.get_rank_repr(rank) for rank in range(grid.world_size())]
        matches = [grid.filter_match(pipe=1, data=0), grid.get_axis_list("data", 1), grid.get_dim("pipe")]
        found += [coordinates, lists, texts, matches]
    generator = torch.Generator().manual_seed(0)
    boundaries = _own_boundaries if is_drop_in else _boundaries_of_deepspeed
    for case in range(6):
        sizes = torch.randint(2, 30, (5 + case,), generator=generator).tolist()
        layers = [
            module.LayerSpec(nn.LayerNorm, size) if at % 3 == 2 else module.LayerSpec(nn.Linear, size, size)
            for at, size in enumerate(sizes)
        ]
        for method in ("uniform", "parameters", "type:linear"):
            found += [boundaries(module, layers, method, stages) for stages in (2, 3, 4)]
    return found


def _own_boundaries(module: Any, layers: list[Any], method: str, stages: int) -> list[int]:
    import deepspeed

    model: Any = deepspeed.PipelineModule.__mro__[1](layers, partition_method=method)
    return [0, *(each.stop for each in model.divide(stages))]


def _boundaries_of_deepspeed(module: Any, layers: list[Any], method: str, stages: int) -> list[int]:
    model = module.PipelineModule.__new__(module.PipelineModule)
    nn.Module.__init__(model)
    model.num_stages, model._layer_specs, model.global_rank = stages, layers, 1
    model._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=0))
    model._partition_layers(method)
    return [int(each) for each in model.parts]


# Sections of the configuration.


CASES: list[tuple[str, dict[str, Any]]] = [
    ("zero", {}),
    ("zero", {"stage": 3, "stage3_max_live_parameters": 5e8, "max_reuse_distance": 7}),
    ("zero", {"stage": 2, "overlap_comm": "auto", "stage3_gather_fp16_weights_on_model_save": True}),
    ("zero", {"cpu_offload": True, "cpu_offload_param": False, "cpu_offload_use_pin_memory": True}),
    ("zero", {"offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": "5"}, "stage": "1"}),
    ("zero", {"leaf_module": {"classes": "a.B", "names": ["c", "c"]}}),
    ("zero", {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}),
    ("zero", {"stage": 4}),
    ("zero", {"stages": 3}),
    ("zero", {"reduce_bucket_size": -1}),
    ("zero", {"offload_param": {"device": "disk"}}),
    ("fp16", {}),
    ("fp16", {"enabled": True, "loss_scale": "3", "min_loss_scale": 0}),
    ("fp16", {"enabled": True, "min_loss_scale": 0}),
    ("fp16", {"enabled": True, "loss_scale_window": True}),
    ("fp16", {"loss_scale": True}),
    ("fp16", {"loss_scale": -1}),
    ("fp16", {"loss_scale": []}),
    ("fp16", {"enabled": "auto", "loss_scale": "auto"}),
    ("bf16", {"enabled": True}),
    ("bf16", {"enabled": 7}),
    ("own", {"old": "x"}),
    ("own", {"new": ["x"], "renamed": 3}),
    ("own", {"other": 3}),
    ("own", {"old": "x", "new": ["x"]}),
    ("own", {"number": "x"}),
]


def sections() -> list[Any]:
    """Values of sections of the configuration with these keys, or the classes of the error."""
    from pydantic import Field

    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    class Own(DeepSpeedConfigModel):
        number: int = 0
        old: str | None = Field(
            None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
        )
        new: list[str] | None = None
        renamed: int = Field(0, alias="other")
        rate: float = 0.5

    kinds = {"zero": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config, "own": Own}
    found: list[Any] = []
    for kind, keys in CASES:
        try:
            section = kinds[kind](**keys)
            deprecated = ("old", "cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save")
            values = section.model_dump(mode="json", exclude=set(deprecated), warnings=False)
            found.append([str((kind, keys)), values])
        except (ValueError, AssertionError) as error:
            found.append([str((kind, keys)), [each.__name__ for each in type(error).__mro__]])
    return found
