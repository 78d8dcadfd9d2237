"""Batches, length of training, precision, optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_core.config.fp8 import FP8Config
from megatron_core.config.optimizers import AlgorithmConfig
from megatron_core.config.ramp import Ramp, Steps, parse_steps


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(FP8Config):
    """Batches, length of training, seeds and precision."""

    micro_batch_size: int = 1
    """Sequences that one rank processes at a time."""
    global_batch_size: int | None = None
    """Sequences in one optimizer step; default micro_batch_size x data-parallel size."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: the global batch starts with START sequences; over the first SAMPLES samples it grows by
    INCREMENT in equal steps up to --global-batch-size."""
    step_batch_size_schedule: tuple[str, ...] | None = None
    """TOKENS:SIZE ...: sequences in one optimizer step from so many tokens on, e.g. 0:384 200B:768 400B:1152; the last
    size is that of --global-batch-size."""
    train_iters: int | None = None
    """Number of optimizer steps of the training; give this or --train-samples."""
    train_samples: int | None = None
    """Number of sequences of the training; give this or --train-iters."""
    skip_train: bool = False
    """Do not train; evaluate on the validation and test data, and exit."""
    eval_interval: int | None = None
    """Steps between evaluations on the validation split; default: only at the end."""
    eval_iters: int = 10
    """Global batches in one evaluation; 0 turns evaluation off."""
    eval_global_batch_size: int | None = None
    """Sequences in one batch of an evaluation; default --global-batch-size."""
    exit_interval: int | None = None
    """Save a checkpoint and exit when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save a checkpoint and exit after this many minutes."""
    seed: int = 1234
    """Seed for initial weights, data order and dropout."""
    bf16: bool = False
    """Weights and activations in bfloat16; main weights and gradients in float32."""
    fp16: bool = False
    """Weights and activations in float16 with a dynamic loss scale; main weights and gradients in float32."""
    fp64: bool = False
    """Everything in float64, for verification and debugging."""
    deterministic_mode: bool = False
    """Only kernels of torch that give the same bits each time; an error where there are none. Data order, initial
    weights and dropout are functions of the seed in any case, and on CPUs so are all results."""
    check_for_nan_in_loss_and_grad: bool = True
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
class OptimizerConfig(AlgorithmConfig):
    """The optimizer and where its state lies, clipping, the loss scale and the learning rate over time."""

    lr: float = 1e-3
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate, at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD", "inverse-square-root"] = "linear"
    """How the learning rate decays after warm-up."""
    lr_decay_iters: int | None = None
    """Step at which the learning rate reaches its lowest value; default the last step."""
    lr_decay_samples: int | None = None
    """As --lr-decay-iters, in sequences; with --train-samples."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """As --lr-warmup-iters, in sequences; with --train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay steps, instead of --lr-warmup-iters."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """As --lr-wsd-decay-iters, in sequences; with --train-samples."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices and embeddings; not applied to biases and norms."""
    start_weight_decay: float | None = None
    """Weight decay at the beginning, for --weight-decay-incr-style linear and cosine."""
    end_weight_decay: float | None = None
    """Weight decay at the end of training, for the same."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay changes from --start-weight-decay to --end-weight-decay; constant: it is --weight-decay."""
    decoupled_lr: float | None = None
    """Highest learning rate of embeddings and output layer; default --lr."""
    decoupled_min_lr: float | None = None
    """Lowest learning rate of embeddings and output layer; default --min-lr."""
    clip_grad: float = 1.0
    """Gradients are scaled down to this global norm if theirs is larger; 0: no clipping."""
    clip_grad_value: float = 0.0
    """Then each element of the gradients is limited to this absolute value; 0: no limit."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state and main weights in the host's memory and update them there."""
    optimizer_offload_fraction: float = 1.0
    """Share of the optimizer state that is offloaded."""
    optimizer_offload_dir: str | None = None
    """Keep optimizer state and main weights in files of this folder, which a step works through in pieces."""
    use_precision_aware_optimizer: bool = False
    """Store in bfloat16 what --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype say; updates are computed in
    float32 and rounded stochastically."""
    main_params_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: no main weights; the optimizer updates the --bf16 weights themselves."""
    loss_scale: float | None = None
    """Constant loss scale for --fp16; default: dynamic."""
    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest value of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Steps in a row without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Steps with overflow after which the dynamic loss scale halves."""

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
