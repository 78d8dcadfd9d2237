"""The setting of forwards that run together with backwards, and its rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import section, setting, unless
from megatron_core.schedules import Schedule, schedules

_PLANS = "megatron_core.features.paired_passes.plans"
SCHEDULES = (
    Schedule("1f1b", f"{_PLANS}:paired_one_f_one_b", chunks=1, in_pairs=True),
    Schedule("interleaved", f"{_PLANS}:paired_interleaved", in_pairs=True),
)


def _frees_weights(parallel: ParallelConfig) -> bool:
    """Whether ZeRO frees the weights of a layer of a pair while those of the other are used."""
    return parallel.dp_zero_stage == 3 and parallel.pipeline_schedule != "dualpipe_v"


@dataclass(frozen=True, kw_only=True)
@section()
class PairedPassesConfig(ParallelConfig):
    """Messages of experts during the computation of another micro-batch."""

    overlap_moe_expert_parallel_comm: bool = setting(
        False,
        when=(
            c.SEVERAL_EXPERT_RANKS,
            unless(
                "--zero-stage 3, which frees the weights of all layers of a stage but one, except with "
                "--pipeline-schedule dualpipe_v",
                lambda run: _frees_weights(run.parallel),
            ),
        ),
    )
    """Send tokens to and from experts while another micro-batch is computed: after the first forwards, each forward
    runs together with the backward of an earlier micro-batch. For --pipeline-schedule 1f1b and interleaved, which then
    hold activations of more micro-batches, and dualpipe_v."""

    def runs_in_pairs(self, config: RunConfig) -> bool:
        """Whether forwards run together with backwards: there are experts, whose exchange is overlapped."""
        has_experts = config.optional("num_experts") is not None
        return self.overlap_moe_expert_parallel_comm and has_experts and not _frees_weights(self)


def pair_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Layouts in which a forward and a backward cannot run together."""
    parallel = config.parallel
    if not parallel.runs_in_pairs(config) or config.model.num_layers < 1:
        return
    schedule, in_pairs = parallel.schedule(config.model.num_layers), schedules(in_pairs=True)
    if (plan_file := config.optional("pipeline_plan")) is not None:
        yield (
            f"overlap_moe_expert_parallel_comm=True chooses the pairs of a schedule, and pipeline_plan={plan_file} has "
            "its own; remove one of them and write pairs as 0F1&0B0"
        )
    elif schedule not in in_pairs:
        yield (
            f"overlap_moe_expert_parallel_comm=True runs forwards together with backwards, which pipeline_schedule="
            f"{schedule} has in no pairs; legal: {', '.join(in_pairs)}"
        )
    if (exchange := config.value("moe_token_dispatcher_type")) != "alltoall":
        yield (
            f"overlap_moe_expert_parallel_comm=True overlaps moe_token_dispatcher_type=alltoall, not {exchange}; "
            "choose alltoall or remove --overlap-moe-expert-parallel-comm"
        )
