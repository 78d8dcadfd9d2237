"""The schedules, the setting of a plan in a file, and its rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, section, setting
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check_plan
from megatron_core.schedules.table import Schedule

_PLANS = "megatron_core.features.pipeline_schedules.plans"
SCHEDULES = (
    Schedule("gpipe", f"{_PLANS}:gpipe", chunks=1),
    Schedule("zb_h1", f"{_PLANS}:zb_h1", chunks=1, splits_backward=True),
    Schedule("zb_h2", f"{_PLANS}:zb_h2", chunks=1, splits_backward=True),
    Schedule("zb_v", f"{_PLANS}:zb_v", chunks=2, splits_backward=True),
    Schedule("dualpipe_v", f"{_PLANS}:dualpipe_v", chunks=2, splits_backward=True),
    Schedule("dualpipe_v", f"{_PLANS}:paired_dualpipe_v", chunks=2, splits_backward=True, in_pairs=True),
)
READ_PLAN = "megatron_core.features.pipeline_schedules.plan_file:read_plan"


@dataclass(frozen=True, kw_only=True)
@section()
class PlanFileConfig(ParallelConfig):
    """A custom order of forwards and backwards."""

    pipeline_plan: str | None = setting(None, when=ALWAYS)
    """Text file with a custom schedule, instead of --pipeline-schedule: one line per rank, with actions such as
    0F0 0F1 0B0 0B1 (docs/pipeline.md)."""

    @classmethod
    def stage_defaults(cls) -> Mapping[str, bool | None]:
        """The settings of stages, with that of the plan."""
        return {**super().stage_defaults(), "pipeline_plan": None}

    @property
    def plan_name(self) -> str:
        """The name of the file, or ""."""
        return Path(self.pipeline_plan).name if self.pipeline_plan else ""

    def plan(self, config: RunConfig, num_microbatches: int, make: Callable[..., Plan]) -> Plan:
        """The checked plan of the file; ``ConfigError`` if its sizes differ from those of the run."""
        if self.pipeline_plan is None:
            return super().plan(config, num_microbatches, make)
        plan: Plan = load_hook(READ_PLAN)(self.pipeline_plan)
        chunks = "num_virtual_stages_per_pipeline_rank"
        sizes = {
            "pipeline_model_parallel_size": (self.pipeline_model_parallel_size, len(plan.ranks)),
            chunks: (self.num_chunks(config.model.num_layers), plan.num_chunks),
            "micro-batches of a rank": (num_microbatches, plan.num_microbatches),
        }
        if self.num_virtual_stages_per_pipeline_rank is None:
            del sizes[chunks]  # taken from the plan
        for name, (ours, theirs) in sizes.items():
            if ours != theirs:
                raise ConfigError(
                    f"pipeline_plan={self.pipeline_plan} is a plan for {name}={theirs}, but the run has {ours}; "
                    "change one of them (micro-batches: global_batch_size / (micro_batch_size x data-parallel size))"
                )
        return check_plan(plan, num_microbatches)


def plan_file_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Two schedules."""
    parallel = config.parallel.section(PlanFileConfig)
    schedule, plan = parallel.pipeline_schedule, parallel.pipeline_plan
    if schedule is not None and plan is not None:
        yield f"pipeline_schedule={schedule} and pipeline_plan={plan} exclude one another; keep one"
