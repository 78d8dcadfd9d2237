"""How the model and its batch are split over ranks, and kinds of lossy sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, BY_RULE, Resume, section, setting
from megatron_core.feature import Extensible, features
from megatron_core.schedules import schedules, training_schedules
from megatron_core.schedules.actions import Plan

if TYPE_CHECKING:
    PipelineSchedule = str
else:

    class _ScheduleNames:
        """The type of the names of all schedules; type hints are evaluated when all features are known."""

        def __or__(self, other: Any) -> Any:
            return Literal[training_schedules()] | other

    PipelineSchedule = _ScheduleNames()

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-LM's names of the ZeRO stages 0 to 3."""


@dataclass(frozen=True, kw_only=True)
@section()
class ParallelConfig(Extensible):
    """The layout: sizes of the parallel axes, pipeline schedule, sharding, and overlap of communication."""

    tensor_model_parallel_size: int = setting(1, r.COUNT, when=ALWAYS, aliases="model_parallel_size")
    """Ranks over which the matrices of each layer are split (TP)."""
    pipeline_model_parallel_size: int = setting(1, r.COUNT, when=ALWAYS)
    """Ranks over which the layers are split, as stages of a pipeline (PP)."""
    context_parallel_size: int = setting(1, r.COUNT, when=ALWAYS)
    """Ranks over which each sequence is split (CP). Each rank has two chunks, so that all ranks have equal work."""
    expert_model_parallel_size: int = setting(1, r.COUNT, needs=c.EXPERTS, aliases="moe_expert_parallel_size")
    """Ranks over which the experts of a layer are split (EP)."""
    expert_tensor_parallel_size: int | None = setting(None, r.COUNT, when=c.EXPERTS)
    """Ranks over which the matrices of each expert are split (ETP); default --tensor-model-parallel-size. EP
    needs less communication."""
    num_virtual_stages_per_pipeline_rank: int | None = setting(None, r.SMALL_COUNT, when=BY_RULE)
    """Number of chunks of layers on each pipeline rank, for the interleaved schedule (Narayanan et al. 2021,
    section 2.2)."""
    pipeline_schedule: PipelineSchedule | None = setting(None, when=ALWAYS)
    """Order of forwards and backwards on the pipeline ranks; default: 1f1b, or interleaved if ranks have several
    chunks. zb_v and dualpipe_v have two chunks on each rank, the second in reverse order. megatron-show-schedule draws
    schedules."""
    overlap_p2p_communication: bool = setting(True, when=c.PIPELINE)
    """Post receives early and wait for sends at the end of a step; --no-overlap-p2p-communication: wait for each send
    immediately."""
    sequence_parallel: bool = setting(False, when=c.TENSOR_PARALLEL)
    """Split activations outside the matrix products along the sequence over the TP ranks (Korthikanti et al. 2022,
    section 4.2.2)."""
    tp_comm_overlap: bool = setting(True, when=c.TENSOR_PARALLEL)
    """Overlap communication of parallel linear layers with matrix products: the reduction of the input gradient with
    the weight gradient, the gather of the input with the input gradient, and the parts of --tp-comm-overlap-chunks;
    --no-tp-comm-overlap: one after the other."""
    tp_comm_overlap_chunks: int = setting(1, r.COUNT, when=c.TENSOR_PARALLEL, aliases="coc_parallel_num")
    """More than 1: pipeline the products of parallel linear layers with their communication (--tp-comm-overlap-rs and
    -ag of Megatron-LM). An all-reduced product is computed in this many parts of the tokens; with --sequence-parallel
    there is one part for each TP rank. Smaller products take longer: measure whole steps with and without it."""
    use_distributed_optimizer: bool = setting(False, when=c.SEVERAL_DATA_RANKS_OR_FILES)
    """Shard optimizer state and main weights over the data-parallel ranks, as --zero-stage 1."""
    zero_stage: Literal[0, 1, 2, 3] | None = setting(None, when=c.SEVERAL_DATA_RANKS_OR_FILES)
    """Tensors that are sharded over the data-parallel ranks. 0: none. 1: optimizer state and main weights. 2: also
    gradients. 3: also weights (Rajbhandari et al. 2020). Default: 1 with --use-distributed-optimizer, else 0."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = setting(
        None, when=c.SEVERAL_DATA_RANKS_OR_FILES
    )
    """Megatron-LM's names of --zero-stage 0, 1, 2, 3."""
    zero3_keep_after_forward: bool = setting(False, needs=c.ZERO_3, when=c.SEVERAL_DATA_RANKS)
    """With --zero-stage 3: keep gathered weights until the end of the step. Each step gathers them once, instead of
    twice per micro-batch, and needs the memory of stage 2."""
    zero3_param_persistence_threshold: int = setting(0, r.COUNT_FROM_0, needs=c.ZERO_3, when=c.SEVERAL_DATA_RANKS)
    """With --zero-stage 3: parameters of at most this number of elements on a rank stay whole on every rank, as with
    stage 2. Code outside of a layer can read them at any time, and gathers have fewer tensors. 0: none."""
    zero3_param_offload_dir: str | None = setting(None, r.FOLDER, needs=c.ZERO_3)
    """With --zero-stage 3: keep the shards of weights in files in this folder, and read each layer's files when the
    layer runs (Rajbhandari et al. 2021)."""
    zero3_param_cpu_offload: bool = setting(False, needs=c.ZERO_3)
    """With --zero-stage 3: keep the shards of weights in host memory, and copy each layer's shards to the device when
    the layer runs (Rajbhandari et al. 2021)."""
    num_distributed_optimizer_instances: int = setting(1, r.COUNT, needs=c.ZERO)
    """Number of groups of data-parallel ranks; tensors are sharded within a group and replicated between groups (hybrid
    sharding). 1: all ranks are one group."""
    grad_reduce_in_bf16: bool = setting(False, when=(c.TRAINING, c.SEVERAL_DATA_RANKS), resume=Resume.REPORTED)
    """Sum gradients over data-parallel ranks in bfloat16, as --grad-compression bf16."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = setting(False, when=c.ZERO_IN_BF16, resume=Resume.REPORTED)
    """With --zero-stage 1 to 3: sum gradients that are sent in bfloat16 in float32 on the receiving rank."""
    grad_compression: str = setting("none", when=(c.TRAINING, c.SEVERAL_DATA_RANKS), resume=Resume.REPORTED)
    """Compression of gradients that are sent. bf16: rounded; --help compression lists the others."""
    overlap_grad_reduce: bool = setting(False, when=(c.TRAINING, c.SEVERAL_DATA_RANKS))
    """Reduce gradient buckets over data-parallel ranks while backward is still running."""
    overlap_param_gather: bool = setting(False, needs=c.ZERO, when=c.SEVERAL_DATA_RANKS)
    """With --zero-stage 1 to 3: gather updated weights during the next forward; at stage 3, gather the next layer's
    weights while a layer runs."""
    ddp_bucket_size: int = setting(40_000_000, r.COUNT, when=c.SEVERAL_DATA_RANKS)
    """Number of elements in a gradient bucket; each bucket is reduced by one collective."""
    layout_invariant: bool = setting(False, when=c.TRAINING, resume=Resume.REPORTED)
    """Compute losses, gradients and weights whose bits do not depend on the layout, the micro-batch size or the
    schedule, in float32 and bfloat16; steps take up to twice as long (docs/equal_bits.md). Its matrix products do not
    depend on --kernel-backend; all ranks must have the same kernels for them."""
    layout_invariant_parts: int | None = setting(None, r.SMALL_COUNT, needs=c.LAYOUT_INVARIANT, resume=Resume.REPORTED)
    """With --layout-invariant: parts of each layer's features, of which each tensor-parallel rank has as many. Default:
    the largest of 8, 4 and 2 that divides the attention heads, else their smallest factor."""
    layout_invariant_chunks: int = setting(8, r.SMALL_COUNT, needs=c.LAYOUT_INVARIANT, resume=Resume.REPORTED)
    """With --layout-invariant: chunks of each sequence; a multiple of twice the context-parallel size."""
    rank_order: str = setting("tp-cp-ep-dp-pp", when=c.SEVERAL_RANKS)
    """Order of the parallel axes in the rank number, fastest-varying first."""
    distributed_backend: Literal["auto", "nccl", "gloo", "shm"] = setting("auto", when=c.SEVERAL_RANKS)
    """Backend of torch.distributed; auto: nccl with GPUs, else shm (shared memory) between the ranks of a host and gloo
    between hosts."""
    distributed_timeout_minutes: float = setting(10.0, r.above_0(10**6), when=ALWAYS)
    """Time in minutes after which a collective that a rank has not joined is an error."""

    @property
    def offloads_weights(self) -> bool:
        """Whether the shards of weights are on disk or in host memory."""
        return self.zero3_param_cpu_offload or self.zero3_param_offload_dir is not None

    @property
    def dp_zero_stage(self) -> int:
        """The ZeRO stage after defaults."""
        if self.zero_stage is not None:
            return self.zero_stage
        if self.data_parallel_sharding_strategy is not None:
            return SHARDING_STRATEGIES.index(self.data_parallel_sharding_strategy)
        return int(self.use_distributed_optimizer)

    @property
    def a2a_size(self) -> int:
        """Number of neighbouring CP ranks that exchange heads before rings exchange keys and values."""
        return 1

    @property
    def reduces_in_bf16(self) -> bool:
        """Whether gradients are summed in bfloat16."""
        return self.grad_reduce_in_bf16 or self.grad_compression == "bf16"

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Number of copies of the model on ``world_size`` ranks (DP)."""
        return world_size // self.model_parallel_size

    @property
    def expert_model_size(self) -> int:
        """Number of ranks that hold one copy of all experts."""
        return self.expert_tensor_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def smallest_world_size(self) -> int:
        """Smallest number of ranks that is a multiple of a model copy and of an expert copy; at least 1."""
        return max(lcm(self.model_parallel_size, self.expert_model_size), 1)

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks over which each expert's matrices are split, after the default (ETP)."""
        etp = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if etp is None else etp

    @property
    def sequence_unit(self) -> tuple[int, str]:
        """The required divisor of every sequence length, and the settings that require it, in words."""
        cp, tp = max(self.context_parallel_size, 1), max(self.tensor_model_parallel_size, 1)
        tp = tp if self.sequence_parallel else 1
        of_tp = f"tensor_model_parallel_size={tp} (sequence_parallel=True)"
        if cp == 1:
            return tp, of_tp
        # Ring attention gives each rank two pieces of the sequence, so that all have the same part of the causal mask.
        of_cp = f"2 x context_parallel_size={cp}"
        return lcm(2 * cp, cp * tp), of_cp if tp == 1 else f"{lcm(2 * cp, cp * tp)}, for {of_cp} and {of_tp}"

    # Features that assign layers to stages, or order the work of the stages, override these methods.

    @classmethod
    def stage_defaults(cls) -> Mapping[str, bool | None]:
        """The settings of stages and of their schedule, with the defaults, which balance the stages by cost."""
        return {"num_virtual_stages_per_pipeline_rank": None, "pipeline_schedule": None}

    def stage_problems(self, config: Any) -> Iterator[str]:
        """Rules of the settings of a ``RunConfig`` that assign layers to stages."""
        return iter(())

    @property
    def accounted_layers(self) -> int:
        """Number of additional layers, 0 to 2, for which embedding and loss count."""
        return 0

    def stages(self, config: Any, num_stages: int) -> list[range] | None:
        """The layers of each stage as the settings of a ``RunConfig`` assign them; None: they are balanced by cost."""
        return None

    def num_chunks(self, num_layers: int) -> int:
        """Number of chunks of layers on each pipeline rank; 1 without interleaving."""
        return self.num_virtual_stages_per_pipeline_rank or self.implied_chunks or 1

    @property
    def implied_chunks(self) -> int | None:
        """Number of chunks on each rank that the schedule requires; None if any number is possible."""
        return schedules()[self.pipeline_schedule].chunks if self.pipeline_schedule is not None else None

    def schedule(self, num_layers: int) -> PipelineSchedule:
        """The pipeline schedule after defaults."""
        return self.pipeline_schedule or ("interleaved" if self.num_chunks(num_layers) > 1 else "1f1b")

    @property
    def plan_name(self) -> str:
        """The name of a plan that replaces the schedule, or ""."""
        return ""

    def runs_in_pairs(self, config: Any) -> bool:
        """Whether forwards run together with backwards of other micro-batches in a ``RunConfig``."""
        return False

    def layout_words(self, num_layers: int, world_size: int) -> str:
        """The layout in the words of ``planner.layout``, such as ``tp2 pp2 v2 sp``."""
        sizes = {
            "tp": self.tensor_model_parallel_size,
            "cp": self.context_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "v": 1 if self.implied_chunks else self.num_chunks(num_layers),
            "dp": self.data_parallel_size(world_size),
            "ep": self.expert_model_parallel_size,
        }
        words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        if self.expert_tensor_parallel_size is not None:
            words.append(f"etp{self.expert_tensor_parallel_size}")
        words += [self.pipeline_schedule] if self.pipeline_schedule else []
        words += ["sp"] * self.sequence_parallel
        words += [f"zero{self.dp_zero_stage}"] if self.dp_zero_stage else []
        words += ["overlap"] * self.overlap_grad_reduce
        return " ".join(words) or "1 process"

    def plan(self, config: Any, num_microbatches: int, make: Callable[..., Plan]) -> Plan:
        """The plan of a step of a ``RunConfig``, by ``make``, which has the arguments of ``schedules.make_plan``."""
        layers = config.model.num_layers
        sizes = (self.pipeline_model_parallel_size, self.num_chunks(layers), num_microbatches)
        return make(self.schedule(layers), *sizes, paired=self.runs_in_pairs(config))


UNCOMPRESSED = "none", "bf16"
"""Values of ``grad_compression`` without a compressor; bf16 rounds the gradients that are sent."""


@dataclass(frozen=True, kw_only=True)
class CompressionKind:
    """A row of ``Feature.compressions``."""

    name: str
    """The value of --grad-compression."""
    build: str
    """Hook: a function from the ``RunConfig`` to the ``data_parallel.compressor.Compressor``."""
    bytes_per_parameter: Callable[[int, int, int], float]
    """Bytes of compressed gradients at the end of a backward, from the bytes of a gradient, the number of data-parallel
    ranks and the ZeRO stage."""
    optimizer: str | None = None
    """The optimizer that is a part of the compression; None: any."""
    added_moments: int = 0
    """Number of moments in addition to those of the optimizer."""
    has_bias_correction: bool = True
    """Whether its optimizer corrects the bias of the moments if the settings request it."""
    is_local: bool = False
    """Whether the weights of data-parallel ranks differ between synchronizations."""
    updates_outside_of_steps: bool = False
    """Whether weights depend on more than the update of a step, so that code after the update must not change them."""


def compression_kinds() -> dict[str, CompressionKind]:
    """All kinds by name."""
    return {row.name: row for feature in features() for row in feature.compressions}


def compression_of(parallel: ParallelConfig) -> CompressionKind | None:
    """The kind that ``grad_compression`` names; None if gradients are summed without a compressor."""
    return compression_kinds().get(parallel.grad_compression)


def added_moments(parallel: ParallelConfig) -> int:
    """Number of moments that gradient compression adds to those of the optimizer."""
    compression = compression_of(parallel)
    return 0 if compression is None else compression.added_moments
