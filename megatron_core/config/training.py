"""Batches, length of training, precision, optimizer and learning rate."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.growth import Growth, constant
from megatron_core.config.optimizers import AlgorithmConfig
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting
from megatron_core.feature import Extensible


@dataclass(frozen=True, kw_only=True)
@section()
class TrainingConfig(Extensible):
    """Batches, length of training, seeds and precision."""

    micro_batch_size: int = setting(1, r.SIZE, when=ALWAYS)
    """Number of sequences that a rank processes at a time."""
    global_batch_size: int | None = setting(None, r.COUNT, when=ALWAYS, resume=Resume.REPORTED)
    """Number of sequences per optimizer step; default: --micro-batch-size x data-parallel size."""
    train_iters: int | None = setting(None, r.COUNT, when=ALWAYS)
    """Number of optimizer steps; give this or --train-samples."""
    train_samples: int | None = setting(None, r.COUNT, when=ALWAYS)
    """Number of sequences to train on; give this or --train-iters."""
    skip_train: bool = setting(False, when=ALWAYS)
    """Evaluate on validation and test data without training, and exit."""
    eval_interval: int | None = setting(None, r.COUNT, when=(c.TRAINING, c.EVALUATION))
    """Steps between evaluations on the validation data; default: only at the end."""
    start_eval_at_iter: int | None = setting(None, r.COUNT, needs=given("eval_interval", "N"), when=c.EVALUATION)
    """No evaluation between steps before this iteration."""
    eval_iters: int = setting(10, r.COUNT_FROM_0, when=ALWAYS)
    """Number of global batches per evaluation; 0: no evaluation."""
    eval_global_batch_size: int | None = setting(None, r.COUNT, when=c.EVALUATION)
    """Number of sequences per global batch of an evaluation; default: --global-batch-size."""
    exit_interval: int | None = setting(None, r.COUNT, when=c.TRAINING)
    """Save a checkpoint and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = setting(None, r.POSITIVE, when=c.TRAINING)
    """Save a checkpoint and exit after this many minutes."""
    seed: int = setting(1234, r.COUNT_FROM_0, when=ALWAYS)
    """Seed for initial weights, data order and dropout."""
    bf16: bool = setting(False, when=ALWAYS, resume=Resume.REPORTED)
    """Weights and activations in bfloat16; main weights and gradients in float32."""
    fp16: bool = setting(False, when=ALWAYS, resume=Resume.REPORTED)
    """Weights and activations in float16 with a dynamic loss scale; main weights and gradients in float32."""
    fp64: bool = setting(False, when=ALWAYS, resume=Resume.REPORTED)
    """Everything in float64, for verification and debugging."""
    deterministic_mode: bool = setting(False, when=ALWAYS)
    """Use only deterministic kernels of torch; an operation without one is an error. Data order, initial weights and
    dropout always depend only on the seed, and on CPUs all results do."""
    disable_bf16_reduced_precision_matmul: bool = setting(False, when=c.BF16)
    """On GPUs: cuBLAS adds the parts of a sum that it splits in float32 instead of bfloat16."""
    check_for_nan_in_loss_and_grad: bool = setting(True, when=ALWAYS)
    """Stop with an error if the loss or the gradient norm is not finite (with --fp16: skip the step);
    --no-check-for-nan-in-loss-and-grad: continue."""

    @property
    def compute_dtype(self) -> str:
        """Name of the torch dtype of weights and activations."""
        chosen = {"bfloat16": self.bf16, "float16": self.fp16, "float64": self.fp64}
        return next((name for name, is_chosen in chosen.items() if is_chosen), "float32")

    def eight_bit_layers(self, num_layers: int) -> range:
        """The layers (numbered from 0) whose products are in 8 bits."""
        return range(0)

    def final_batch_size(self, data_parallel_size: int) -> int:
        """Number of sequences per optimizer step, after defaults and at the end of its growth."""
        return self.global_batch_size or self.micro_batch_size * data_parallel_size

    def evaluation_batch_size(self, data_parallel_size: int) -> int:
        """Number of sequences per global batch of an evaluation, after defaults."""
        return self.eval_global_batch_size or self.final_batch_size(data_parallel_size)

    def batch_growth(self, data_parallel_size: int, seq_length: int) -> Growth:
        """Number of sequences per optimizer step as a function of consumed samples of ``seq_length`` tokens."""
        return constant(self.final_batch_size(data_parallel_size))

    def steps_left(self, data_parallel_size: int, iteration: int, consumed_samples: int, seq_length: int) -> int:
        """Number of optimizer steps after iteration ``iteration``, at which ``consumed_samples`` sequences of
        ``seq_length`` tokens have been used."""
        if self.train_iters is not None:
            return max(self.train_iters - iteration, 0)
        growth, steps = self.batch_growth(data_parallel_size, seq_length), 0
        left = (self.train_samples or 0) - consumed_samples
        while consumed_samples < growth.samples and left >= (batch := growth.at(consumed_samples)):
            # All steps of one size at once: counting the steps of a ramp over 10^14 samples one by one takes too long.
            until = -(-(growth.change_after(consumed_samples) - consumed_samples) // batch)
            count = min(until, left // batch)
            consumed_samples, left, steps = consumed_samples + count * batch, left - count * batch, steps + count
        return steps + max(left, 0) // growth.at(consumed_samples)

    def num_iterations(self, data_parallel_size: int, seq_length: int) -> int:
        """Number of optimizer steps of the whole training."""
        return self.steps_left(data_parallel_size, 0, 0, seq_length)


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class OptimizerConfig(AlgorithmConfig, Extensible):
    """The optimizer and the place of its state, clipping, loss scale, and schedules of learning rate and weight
    decay."""

    lr: float = setting(1e-3, r.NON_NEGATIVE, resume=Resume.SCHEDULE)
    """Highest learning rate."""
    min_lr: float = setting(0.0, r.NON_NEGATIVE, when=c.LR_DECAY, resume=Resume.SCHEDULE)
    """Lowest learning rate, at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD", "inverse-square-root"] = setting(
        "linear", resume=Resume.SCHEDULE
    )
    """Shape of the decay of the learning rate after warm-up."""
    lr_decay_iters: int | None = setting(None, r.COUNT, when=c.LR_DECAY, resume=Resume.SCHEDULE)
    """Step at which the learning rate reaches its lowest value; default: the last step."""
    lr_decay_samples: int | None = setting(None, r.COUNT, when=c.LR_DECAY, resume=Resume.SCHEDULE)
    """As --lr-decay-iters, in sequences; with --train-samples."""
    lr_warmup_iters: int = setting(0, r.COUNT_FROM_0, resume=Resume.SCHEDULE)
    """Number of steps of linear warm-up."""
    lr_warmup_samples: int = setting(0, r.COUNT_FROM_0, resume=Resume.SCHEDULE)
    """As --lr-warmup-iters, in sequences; with --train-samples."""
    lr_warmup_fraction: float | None = setting(None, r.BELOW_1, resume=Resume.SCHEDULE, aliases="warmup")
    """Warm-up as a fraction of the decay steps, instead of --lr-warmup-iters."""
    lr_warmup_init: float = setting(0.0, r.NON_NEGATIVE, when=c.WARMUP, resume=Resume.SCHEDULE)
    """Learning rate at the start of warm-up."""
    lr_one_step_later: bool = setting(False, resume=Resume.SCHEDULE)
    """Apply to each step the learning rate and weight decay of the step before, as Megatron-LM does, so that the first
    step of a warm-up has --lr-warmup-init; required to continue its runs from --load."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", when=c.WSD, resume=Resume.SCHEDULE
    )
    """Shape of the last phase of WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = setting(None, r.COUNT, needs=c.WSD, resume=Resume.SCHEDULE, is_refinement=True)
    """Number of steps of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = setting(None, r.COUNT, needs=c.WSD, resume=Resume.SCHEDULE, is_refinement=True)
    """As --lr-wsd-decay-iters, in sequences; with --train-samples."""
    weight_decay: float = setting(0.01, r.NON_NEGATIVE, when=c.CONSTANT_WEIGHT_DECAY, resume=Resume.SCHEDULE)
    """Decoupled weight decay of matrices and embeddings; not applied to biases and norms."""
    start_weight_decay: float | None = setting(None, r.NON_NEGATIVE, resume=Resume.SCHEDULE)
    """Initial weight decay for --weight-decay-incr-style linear and cosine."""
    end_weight_decay: float | None = setting(None, r.NON_NEGATIVE, resume=Resume.SCHEDULE)
    """Final weight decay for --weight-decay-incr-style linear and cosine."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting("constant", resume=Resume.SCHEDULE)
    """Change of weight decay from --start-weight-decay to --end-weight-decay; constant: always --weight-decay."""
    decoupled_lr: float | None = setting(None, r.POSITIVE, resume=Resume.SCHEDULE)
    """Highest learning rate of embeddings and output layer; default: --lr."""
    decoupled_min_lr: float | None = setting(
        None,
        r.NON_NEGATIVE,
        needs=given("decoupled_lr", "X"),
        when=c.LR_DECAY,
        resume=Resume.SCHEDULE,
        is_refinement=True,
    )
    """Lowest learning rate of embeddings and output layer; default: --min-lr."""
    clip_grad: float = setting(1.0, r.NON_NEGATIVE)
    """Maximum global norm of gradients; larger gradients are scaled down to it. 0: no clipping."""
    clip_grad_value: float = setting(0.0, r.NON_NEGATIVE)
    """Maximum absolute value of gradient elements after --clip-grad; 0: no limit."""
    optimizer_cpu_offload: bool = setting(False, when=(c.NO_OFFLOAD_DIR, c.GPU), resume=Resume.FREE)
    """Keep optimizer state and main weights in the host's memory and update them there."""
    optimizer_offload_fraction: float = setting(
        1.0, r.POSITIVE_UP_TO_1, needs=c.OPTIMIZER_OFFLOAD, resume=Resume.FREE, is_refinement=True
    )
    """Share of the optimizer state that is offloaded."""
    optimizer_offload_dir: str | None = setting(None, r.FOLDER, resume=Resume.FREE)
    """Keep optimizer state and main weights in files in this folder; each step processes them in pieces."""

    @property
    def scale_rule(self) -> str | None:
        """Hook: a function from these settings to the ``optimizer.loss_scale.LossScale`` of weights in float16, which a
        feature overrides; None: the loss is not scaled."""
        return None

    def bucket_rule(self, zero_stage: int) -> str | None:
        """Hook: a function from a ``BucketKind`` and a number of shards to the ``FillRule`` of buckets, which a feature
        overrides; None: parameters are in order."""
        return None

    @property
    def rounded_update(self) -> str:
        """Hook: ``features.bf16_state.rounding.update_rounded``, for shards with ``bf16_settings``; "" without them."""
        return ""

    @property
    def has_warmup(self) -> bool:
        """Whether the learning rate warms up."""
        return bool(self.lr_warmup_iters or self.lr_warmup_samples or self.lr_warmup_fraction)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state is stored on the host or in files instead of next to the weights."""
        return self.optimizer_cpu_offload or self.optimizer_offload_dir is not None

    def decoupled(self) -> "OptimizerConfig | None":
        """Settings of the learning rate of embeddings and output layer; None if they use the rate of other
        parameters."""
        if self.decoupled_lr is None:
            return None
        lowest = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=lowest)

    @property
    def counts_iterations(self) -> bool:
        """Whether a phase of the learning rate is given in optimizer steps."""
        return bool(self.lr_decay_iters or self.lr_warmup_iters or self.lr_wsd_decay_iters)

    @property
    def counts_samples(self) -> bool:
        """Whether a phase of the learning rate is given in sequences."""
        return bool(self.lr_decay_samples or self.lr_warmup_samples or self.lr_wsd_decay_samples)


@dataclass(frozen=True, kw_only=True)
@section()
class BadStepConfig:
    """Bad steps."""

    max_bad_steps: int = setting(0, r.COUNT_FROM_0, when=c.TRAINING)
    """Number of consecutive bad steps (loss or gradient norm not finite, or a spike) that are skipped. After one more
    the run loads its last checkpoint and omits the batches of these steps. 0: the first bad step is an error."""
    max_rollbacks: int = setting(3, r.COUNT_FROM_0, when=c.BAD_STEPS)
    """With --max-bad-steps: number of times that a run loads its last checkpoint before it ends with an error."""
    spike_factor: float | None = setting(None, r.POSITIVE, needs=c.BAD_STEPS)
    """With --max-bad-steps: a step is also bad if its gradient norm is larger than this factor times the median of the
    last 64 good steps."""
    save_bad_steps: int = setting(1, r.COUNT_FROM_0, when=c.SAVE)
    """With --save: number of bad steps whose weights and samples are stored in bad_steps, for megatron-replay-step."""
    iterations_to_skip: tuple[int, ...] = setting((), when=c.TRAINING)
    """Iterations whose batches are skipped."""
