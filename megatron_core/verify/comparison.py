"""The models and layouts that ``megatron-verify`` compares with one process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from random import Random

from megatron_core.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_core.config.rules_single import missing_modes
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.config.validate import check, problems
from megatron_core.errors import ConfigError
from megatron_core.features.cuda_graphs.settings import GraphConfig
from megatron_core.planner.layout import Layout as Layout
from megatron_core.verify.shrink import OF_COMPARISON, SIZES, shrunk, shrunk_stages, small_run
from megatron_core.verify.together import incomparable

NOT_IN_NAMES = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "num_distributed_optimizer_instances",
    "zero3_keep_after_forward",
    "zero3_param_persistence_threshold",
)
"""Settings of a layout that its name does not have."""


HEADING = "# Layouts compared with one process"
"""First line of a page of values."""
BITS_HEADING = "# Layouts with the bits of one process"
OF_EVERY_LAYOUT = (
    "num_distributed_optimizer_instances",
    "zero3_keep_after_forward",
    "zero3_param_persistence_threshold",
)
"""Settings among ``NOT_IN_NAMES`` that apply to each of --layouts; its word ``overlap`` decides about the others."""


NO_SWITCHES = """
    micro_batch_size train_iters train_samples skip_train eval_interval eval_iters eval_global_batch_size exit_interval
    exit_duration_in_mins seed moe_router_force_load_balancing disable_bf16_reduced_precision_matmul"""
"""Settings with which a run may resume although they change its results, its steps or its data."""

_IN_NAMES = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_schedule"
OF_STAGES = {name: usual for name, usual in ParallelConfig().stage_defaults().items() if name not in _IN_NAMES}
"""Settings of the pipeline stages and of the plan, with their defaults."""


@dataclass(frozen=True)
class Task:
    """The model and layouts to compare."""

    config: RunConfig
    """The model, usually a small version of it."""
    layouts: list[Layout]
    """The layouts to compare with one process."""
    own_settings: dict[str, object] = field(default_factory=dict)
    """Settings of the model's flags that the name of a layout does not include."""
    notes: tuple[str, ...] = ()
    """Differences between what is compared and what the flags describe."""
    refused: dict[str, str] = field(default_factory=dict)
    """Layouts of --all that are not compared, with the reason."""
    not_compared: dict[str, object] = field(default_factory=dict)
    """Settings of the flags that the comparison leaves out."""
    dtypes: list[str] = field(default_factory=lambda: ["float64"])
    """The dtypes of the comparison, one after the other."""
    changed: dict[str, tuple[object, object]] = field(default_factory=dict)
    """Settings with another value in the comparison: the value of the flags and the compared one."""


def fitting_layouts(config: RunConfig, world_size: int) -> list[Layout]:
    """Return every layout of ``world_size`` ranks that is legal for ``config``."""
    has_experts = config.optional("num_experts") is not None
    candidates = every_layout(world_size, config.model.num_layers, experts=has_experts)
    return [layout for layout in candidates if not any(problems(configured(config, layout, "float64"), world_size))]


def switches(config: RunConfig) -> dict[str, object]:
    """Settings of ``config`` that decide how results are computed, but not their values, and differ from defaults.

    These are the settings with which a run may resume from a checkpoint of a run without them, except those of the
    data and of the steps. One process computes the reference without them.
    """
    defaults = RunConfig().flat()
    values = config.flat()
    return {name: values[name] for name in _switch_names() if values[name] != defaults[name]}


def _switch_names() -> list[str]:
    kinds = (ModelConfig, ParallelConfig, TrainingConfig, OptimizerConfig, GraphConfig)
    free = [name for kind in kinds for name in names_by_resume(kind, Resume.FREE)]
    return [name for name in free if name not in NO_SWITCHES.split()]


def without_switches(config: RunConfig) -> RunConfig:
    """``config`` of one process, with the PyTorch reference of each operation."""
    defaults = RunConfig().flat()
    plain = RunConfig.from_flat(config.flat() | {name: defaults[name] for name in _switch_names()})
    for name, value in {"kernel_backend": "reference", "attention_backend": "unfused"}.items():
        candidate = RunConfig.from_flat(plain.flat() | {name: value})
        if not any(problems(candidate, 1)):
            plain = candidate
    return plain


def configured(
    config: RunConfig, layout: Layout, dtype: str, own_settings: Mapping[str, object] | None = None
) -> RunConfig:
    """Return ``config`` with a layout, a dtype, and optional settings that a layout's words cannot express.

    Settings that the layout or the dtype cannot use, such as ``zero3_keep_after_forward`` in a layout without ZeRO 3,
    have their defaults.
    """
    replaced: dict[str, object] = {"fp64": dtype == "float64", "bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    if not replaced["bf16"]:  # the residual stream and the main weights have the dtype of the weights
        replaced |= {"fp32_residual_connection": False, "main_params_dtype": "fp32"}
    if layout.cp == 1:
        replaced["hierarchical_context_parallel_sizes"] = None
    chosen = RunConfig.from_flat(config.flat() | layout.settings() | replaced | dict(own_settings or {}))
    defaults = RunConfig().flat()
    candidates = [name for name, value in chosen.flat().items() if value != defaults[name]]
    # What the flags' own run cannot use remains, and is reported as an error.
    idle = missing_modes(chosen, candidates).keys() - missing_modes(config, candidates).keys()
    return RunConfig.from_flat(chosen.flat() | {name: defaults[name] for name in idle}) if idle else chosen


def require_legal(task: Task, dtype: str) -> None:
    """``ConfigError`` if a layout of ``task`` cannot be trained in ``dtype``."""
    for layout in task.layouts:
        problems_found = list(problems(configured(task.config, layout, dtype, task.own_settings), layout.world_size))
        if problems_found:
            raise ConfigError(f"layout {str(layout)!r} cannot be trained: {'; '.join(problems_found)}")
        if reason := incomparable(task.config, layout):
            raise ConfigError(f"layout {str(layout)!r} cannot be compared: {reason}")


def not_compared(task: Task, config: RunConfig, dtype: str) -> dict[str, object]:
    """Settings of ``config`` that differ from their defaults and have them in a layout of ``task``."""
    replaced = {*OF_COMPARISON, *SIZES}
    defaults = RunConfig().flat()
    return {
        name: value
        for name, value, compared in _differences(task, config, dtype)
        if name not in replaced and value != defaults[name] and defaults[name] in compared
    }


def changed_values(task: Task, config: RunConfig, dtype: str) -> dict[str, tuple[object, object]]:
    """All other settings with another value in a layout of ``task`` than in ``config``, with both values."""
    left_out = not_compared(task, config, dtype)
    differences = _differences(task, config, dtype)
    return {name: (value, compared[0]) for name, value, compared in differences if name not in left_out}


def changed_lines(changed: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """Yield the line with the settings that have another value in the comparison, if there are any."""
    pairs = [f"{name} {value} -> {compared}" for name, (value, compared) in changed.items()]
    if pairs:
        yield f"compared with other values: {', '.join(pairs)}"


def _differences(task: Task, config: RunConfig, dtype: str) -> Iterator[tuple[str, object, list[object]]]:
    """Name, value and other values of each setting that a layout of ``task`` has otherwise than ``config``, except the
    words of layouts."""
    words = Layout().settings().keys() - OF_STAGES.keys() - {*OF_EVERY_LAYOUT}
    every = [configured(task.config, layout, dtype, task.own_settings).flat() for layout in task.layouts]
    for name, value in config.flat().items():
        compared = [flat[name] for flat in every if flat[name] != value]
        if compared and name not in words:
            yield name, value, compared


def said_of_stages(config: RunConfig) -> dict[str, object]:
    """Settings of the pipeline stages and the plan that differ from the defaults."""
    values = {name: getattr(config.parallel, name) for name in OF_STAGES}
    return {name: value for name, value in values.items() if value != OF_STAGES[name]}


def layout_task(config: RunConfig, ranks: int, full_size: RunConfig | None = None) -> Task:
    """The layout of the configuration itself on ``ranks`` ranks, with a small model or the one of ``full_size``.

    Errors: ``ConfigError`` if the settings are illegal, or there is nothing to compare.
    """
    check(RunConfig.from_flat(config.flat() | small_run()), ranks)
    layout = Layout.of(config.parallel, config.model.num_layers, ranks)
    stage_settings = said_of_stages(config)
    if layout.world_size == 1:
        raise ConfigError(
            "no layout to check; give --layouts (such as --layouts tp2 'pp2 v2'), --all --world-size 2 4 8, "
            "or flags of the model (such as --tensor-model-parallel-size 2)"
        )
    if "pipeline_plan" in stage_settings and full_size is None:
        raise ConfigError("pipeline_plan needs the full-size number of micro-batches; add --full-size to check it")
    # A layout's name has one ``overlap`` for two settings, and chunks only for balanced stages.
    settings = stage_settings | {name: getattr(config.parallel, name) for name in NOT_IN_NAMES}
    if stage_settings:
        counted = layout.chunks > 1 and "pipeline_model_parallel_layout" not in stage_settings
        settings["num_virtual_stages_per_pipeline_rank"] = layout.chunks if counted else None
    fewer = None if full_size is not None or not stage_settings else shrunk_stages(config, layout)
    if fewer is None:
        return Task(full_size or shrunk(config, [layout], keep_layers=bool(stage_settings)), [layout], settings)
    settings |= {name: value for name, value in fewer.items() if name in stage_settings}
    small = shrunk(RunConfig.from_flat(config.flat() | fewer), [layout], keep_layers=True)
    return Task(small, [layout], settings)


def pairwise(combined: Sequence[Mapping[str, str]], seed: str) -> set[int]:
    """Indices of a subset that contains every pair of values in ``combined``, chosen greedily in a seeded order."""
    pairs: list[set[object]] = [
        set(combinations(sorted(values.items()), 2)) or set(values.items()) for values in combined
    ]
    order = list(range(len(combined)))
    subset = set[int]()
    missing = set[object]().union(*pairs)
    Random(seed).shuffle(order)
    while missing:
        best = max(order, key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        subset.add(best)
    return subset


def every_layout(world_size: int, max_stages: int, *, experts: bool = False) -> Iterator[Layout]:
    """All layouts of ``world_size`` ranks with at most ``max_stages`` stages, including those that do not fit a model.

    ``experts``: also yield each layout with all splits of experts over the ranks of a stage.
    """
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tp in reversed(sizes):
        for pp in sizes:
            for cp in sizes:
                if world_size % (tp * pp * cp):
                    continue
                dp = world_size // (tp * pp * cp)
                for chunks in range(1, max_stages // pp + 1 if pp > 1 else 2):
                    for layout in _variants(Layout(tp=tp, cp=cp, pp=pp, dp=dp, chunks=chunks)):
                        yield from _expert_splits(layout, sizes) if experts else [layout]


def _variants(layout: Layout) -> Iterator[Layout]:
    """The layout with every combination of switches that have an effect in it.

    With context parallelism, over whose ranks optimizer state and weights are also sharded, only some combinations.
    """
    sharding = [(0, False)]
    if layout.cp > 1:
        sharding += [(1, True), (3, False)]
    elif layout.dp > 1:
        sharding = list(product((0, 1, 2, 3), (False, True)))
    for sequence_parallel in (False, True)[: 1 + (layout.tp > 1)]:
        for stage, overlap in sharding:
            yield replace(layout, sequence_parallel=sequence_parallel, zero_stage=stage, overlap=overlap)


def _expert_splits(layout: Layout, sizes: list[int]) -> Iterator[Layout]:
    """The layout with all splits of experts over the ranks of a stage."""
    for ep, etp in product(sizes, sizes):
        if layout.tp * layout.cp * layout.dp % (ep * etp) == 0:
            yield replace(layout, ep=ep, etp=None if etp == layout.tp else etp)
