"""Batches, length of training, precision, optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.fp8 import FP8Config
from megatron_core.config.optimizers import AlgorithmConfig
from megatron_core.config.ramp import Ramp, Steps, parse_steps
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section()
class TrainingConfig(FP8Config):
    """Batches, length of training, seeds and precision."""

    micro_batch_size: int = setting(1, r.SIZE, when=ALWAYS)
    """Sequences that one rank processes at a time."""
    global_batch_size: int | None = setting(None, r.COUNT, when=ALWAYS, resume=Resume.REPORTED)
    """Sequences in one optimizer step; default micro_batch_size x data-parallel size."""
    rampup_batch_size: tuple[int, int, int] | None = setting(None, when=ALWAYS, resume=Resume.REPORTED)
    """START INCREMENT SAMPLES: the global batch starts with START sequences; over the first SAMPLES samples it grows by
    INCREMENT in equal steps up to --global-batch-size."""
    step_batch_size_schedule: tuple[str, ...] | None = setting(None, when=ALWAYS, resume=Resume.REPORTED)
    """TOKENS:SIZE ...: sequences in one optimizer step from so many tokens on, e.g. 0:384 200B:768 400B:1152; the last
    size is that of --global-batch-size."""
    train_iters: int | None = setting(None, r.COUNT, when=ALWAYS)
    """Number of optimizer steps of the training; give this or --train-samples."""
    train_samples: int | None = setting(None, r.COUNT, when=ALWAYS)
    """Number of sequences of the training; give this or --train-iters."""
    skip_train: bool = setting(False, when=ALWAYS)
    """Do not train; evaluate on the validation and test data, and exit."""
    eval_interval: int | None = setting(None, r.COUNT, when=(c.TRAINING, c.EVALUATION))
    """Steps between evaluations on the validation split; default: only at the end."""
    eval_iters: int = setting(10, r.COUNT_FROM_0, when=ALWAYS)
    """Global batches in one evaluation; 0 turns evaluation off."""
    eval_global_batch_size: int | None = setting(None, r.COUNT, when=c.EVALUATION)
    """Sequences in one batch of an evaluation; default --global-batch-size."""
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
    """Only kernels of torch that give the same bits each time; an error where there are none. Data order, initial
    weights and dropout are functions of the seed in any case, and on CPUs so are all results."""
    check_for_nan_in_loss_and_grad: bool = setting(True, when=ALWAYS)
    """Stop with an error if the loss or the gradient norm is not finite (with --fp16 the step is skipped instead);
    --no-check-for-nan-in-loss-and-grad continues."""

    @property
    def compute_dtype(self) -> str:
        """Name of the torch dtype of weights and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float64" if self.fp64 else "float32"

    def final_batch_size(self, data_parallel_size: int) -> int:
        """Sequences in one optimizer step after defaults, and after the ramp if there is one."""
        steps = parse_steps(self.step_batch_size_schedule or (), 1)
        return self.global_batch_size or (steps[-1][1] if steps else self.micro_batch_size * data_parallel_size)

    def evaluation_batch_size(self, data_parallel_size: int) -> int:
        """Sequences in one batch of an evaluation after defaults."""
        return self.eval_global_batch_size or self.final_batch_size(data_parallel_size)

    def batch_ramp(self, data_parallel_size: int, seq_length: int) -> Ramp | Steps:
        """Sequences in one optimizer step as a function of the samples, of ``seq_length`` tokens, consumed."""
        if self.step_batch_size_schedule is not None:
            return Steps(parse_steps(self.step_batch_size_schedule, seq_length))
        return Ramp.of(self.rampup_batch_size, self.final_batch_size(data_parallel_size))

    def steps_left(self, data_parallel_size: int, iteration: int, consumed_samples: int, seq_length: int) -> int:
        """Optimizer steps after iteration ``iteration``, up to which ``consumed_samples`` sequences of ``seq_length``
        tokens were used."""
        if self.train_iters is not None:
            return max(self.train_iters - iteration, 0)
        ramp, steps = self.batch_ramp(data_parallel_size, seq_length), 0
        left = (self.train_samples or 0) - consumed_samples
        while consumed_samples < ramp.samples and left >= (batch := ramp.at(consumed_samples)):
            # All steps of one size at once: a ramp over 10^14 samples has too many to count them one by one.
            until = -(-(ramp.change_after(consumed_samples) - consumed_samples) // batch)
            count = min(until, left // batch)
            consumed_samples, left, steps = consumed_samples + count * batch, left - count * batch, steps + count
        return steps + max(left, 0) // ramp.at(consumed_samples)

    def num_iterations(self, data_parallel_size: int, seq_length: int) -> int:
        """Optimizer steps of the whole training."""
        return self.steps_left(data_parallel_size, 0, 0, seq_length)


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class OptimizerConfig(AlgorithmConfig):
    """The optimizer and where its state lies, clipping, the loss scale and the learning rate over time."""

    lr: float = setting(1e-3, r.NON_NEGATIVE, resume=Resume.SCHEDULE)
    """Highest learning rate."""
    min_lr: float = setting(0.0, r.NON_NEGATIVE, when=c.LR_DECAY, resume=Resume.SCHEDULE)
    """Lowest learning rate, at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD", "inverse-square-root"] = setting(
        "linear", resume=Resume.SCHEDULE
    )
    """How the learning rate decays after warm-up."""
    lr_decay_iters: int | None = setting(None, r.COUNT, when=c.LR_DECAY, resume=Resume.SCHEDULE)
    """Step at which the learning rate reaches its lowest value; default the last step."""
    lr_decay_samples: int | None = setting(None, r.COUNT, when=c.LR_DECAY, resume=Resume.SCHEDULE)
    """As --lr-decay-iters, in sequences; with --train-samples."""
    lr_warmup_iters: int = setting(0, r.COUNT_FROM_0, resume=Resume.SCHEDULE)
    """Steps of linear warm-up."""
    lr_warmup_samples: int = setting(0, r.COUNT_FROM_0, resume=Resume.SCHEDULE)
    """As --lr-warmup-iters, in sequences; with --train-samples."""
    lr_warmup_fraction: float | None = setting(None, r.BELOW_1, resume=Resume.SCHEDULE, aliases="warmup")
    """Warm-up as a fraction of the decay steps, instead of --lr-warmup-iters."""
    lr_warmup_init: float = setting(0.0, r.NON_NEGATIVE, when=c.WARMUP, resume=Resume.SCHEDULE)
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", when=c.WSD, resume=Resume.SCHEDULE
    )
    """Shape of the last phase of WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = setting(None, r.COUNT, needs=c.WSD, resume=Resume.SCHEDULE)
    """Steps of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = setting(None, r.COUNT, needs=c.WSD, resume=Resume.SCHEDULE)
    """As --lr-wsd-decay-iters, in sequences; with --train-samples."""
    weight_decay: float = setting(0.01, r.NON_NEGATIVE, when=c.CONSTANT_WEIGHT_DECAY, resume=Resume.SCHEDULE)
    """Decoupled weight decay of matrices and embeddings; not applied to biases and norms."""
    start_weight_decay: float | None = setting(None, r.NON_NEGATIVE, resume=Resume.SCHEDULE)
    """Weight decay at the beginning, for --weight-decay-incr-style linear and cosine."""
    end_weight_decay: float | None = setting(None, r.NON_NEGATIVE, resume=Resume.SCHEDULE)
    """Weight decay at the end of training, for the same."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting("constant", resume=Resume.SCHEDULE)
    """How weight decay changes from --start-weight-decay to --end-weight-decay; constant: it is --weight-decay."""
    decoupled_lr: float | None = setting(None, r.POSITIVE, resume=Resume.SCHEDULE)
    """Highest learning rate of embeddings and output layer; default --lr."""
    decoupled_min_lr: float | None = setting(
        None, r.NON_NEGATIVE, needs=given("decoupled_lr", "X"), when=c.LR_DECAY, resume=Resume.SCHEDULE
    )
    """Lowest learning rate of embeddings and output layer; default --min-lr."""
    clip_grad: float = setting(1.0, r.NON_NEGATIVE)
    """Gradients are scaled down to this global norm if theirs is larger; 0: no clipping."""
    clip_grad_value: float = setting(0.0, r.NON_NEGATIVE)
    """Then each element of the gradients is limited to this absolute value; 0: no limit."""
    optimizer_cpu_offload: bool = setting(False, when=(c.NO_OFFLOAD_DIR, c.GPU), resume=Resume.FREE)
    """Keep optimizer state and main weights in the host's memory and update them there."""
    optimizer_offload_fraction: float = setting(1.0, r.POSITIVE_UP_TO_1, needs=c.OPTIMIZER_OFFLOAD, resume=Resume.FREE)
    """Share of the optimizer state that is offloaded."""
    optimizer_offload_dir: str | None = setting(None, r.FOLDER, resume=Resume.FREE)
    """Keep optimizer state and main weights in files of this folder, which a step works through in pieces."""
    use_precision_aware_optimizer: bool = setting(False, when=c.BF16_STATE)
    """Allow bf16 for --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype; updates are computed in float32 and
    rounded stochastically."""
    main_params_dtype: Literal["fp32", "bf16"] = setting("fp32", needs=(c.PRECISION_AWARE, c.BF16))
    """bf16: no main weights; the optimizer updates the --bf16 weights themselves."""
    loss_scale: float | None = setting(None, r.POSITIVE, needs=given("fp16"))
    """Constant loss scale for --fp16; default: dynamic."""
    initial_loss_scale: float = setting(2.0**32, r.POSITIVE, when=c.DYNAMIC_LOSS_SCALE)
    """First value of the dynamic loss scale."""
    min_loss_scale: float = setting(1.0, r.POSITIVE, when=c.DYNAMIC_LOSS_SCALE, aliases="min_scale")
    """Smallest value of the dynamic loss scale."""
    loss_scale_window: int = setting(1000, r.COUNT, when=c.DYNAMIC_LOSS_SCALE)
    """Steps in a row without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = setting(2, r.COUNT, when=c.DYNAMIC_LOSS_SCALE)
    """Steps with overflow after which the dynamic loss scale halves."""

    @property
    def has_warmup(self) -> bool:
        """Whether the learning rate warms up."""
        return bool(self.lr_warmup_iters or self.lr_warmup_samples or self.lr_warmup_fraction)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state lies elsewhere than the weights."""
        return self.optimizer_cpu_offload or self.optimizer_offload_dir is not None

    @property
    def bf16_settings(self) -> dict[str, str]:
        """What is stored in bfloat16, by setting."""
        names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        return {name: getattr(self, name) for name in names if getattr(self, name) == "bf16"}

    def decoupled(self) -> OptimizerConfig | None:
        """The settings of the learning rate of embeddings and output layer; None if they have no own."""
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
