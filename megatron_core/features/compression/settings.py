"""Settings of lossy gradient compression, and its kinds."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.parallel import CompressionKind
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Condition, Resume, section, setting

BUILD = "megatron_core.features.compression.build"


def _powersgd_bytes(wide: int, data_parallel_size: int, zero_stage: int) -> float:
    """Errors of messages, stored twice until the step is taken; from ZeRO stage 2 on also whole gradients."""
    return 2 * wide + (wide if zero_stage >= 2 else 0)


def _sign_bytes(wide: int, data_parallel_size: int, zero_stage: int) -> float:
    """The errors of messages and of this rank's share 1 / d of the sums, stored twice until the step is taken. With
    ZeRO, the momentum, its sum and a flag of each element are whole, from stage 2 on also the gradients."""
    whole_gradients = wide if zero_stage >= 2 else 0
    return 2 * (wide + wide / data_parallel_size) + whole_gradients + (2 * wide + 1 if zero_stage else 0)


def _local_step_bytes(wide: int, data_parallel_size: int, zero_stage: int) -> float:
    """The weights of the last synchronization, their change since then, and errors of gradients."""
    return wide + wide / data_parallel_size + 2 * wide


FROM_2 = lambda wide, _, zero_stage: wide if zero_stage >= 2 else 0.0  # noqa: E731
KINDS = (
    CompressionKind(name="int4-gradients", build=f"{BUILD}:build_blocks", bytes_per_parameter=FROM_2),
    CompressionKind(name="int8-weights", build=f"{BUILD}:build_blocks", bytes_per_parameter=lambda *_: 0.0),
    CompressionKind(name="int4-gradients-int8-weights", build=f"{BUILD}:build_blocks", bytes_per_parameter=FROM_2),
    CompressionKind(name="powersgd", build=f"{BUILD}:build_powersgd", bytes_per_parameter=_powersgd_bytes),
    CompressionKind(
        name="onebit-adam", build=f"{BUILD}:build_onebit_adam", bytes_per_parameter=_sign_bytes, optimizer="adam"
    ),
    CompressionKind(
        name="onebit-lamb",
        build=f"{BUILD}:build_onebit_lamb",
        bytes_per_parameter=_sign_bytes,
        optimizer="lamb",
        added_moments=1,
        has_bias_correction=False,
        updates_outside_of_steps=True,
    ),
    CompressionKind(
        name="zero-one-adam",
        build=f"{BUILD}:build_zero_one_adam",
        bytes_per_parameter=_local_step_bytes,
        optimizer="adam",
        has_bias_correction=False,
        is_local=True,
        updates_outside_of_steps=True,
    ),
)


def _chosen(*names: str) -> Condition:
    """The condition that one of the kinds ``names`` is chosen."""
    *first, final = names
    listed = f"{', '.join(first)} or {final}" if first else final
    return Condition(f"--grad-compression {listed}", lambda run: run.parallel.grad_compression in names)


ONEBIT_LAMB = _chosen("onebit-lamb")
ZERO_ONE_ADAM = _chosen("zero-one-adam")


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class CompressionConfig:
    """Lossy messages. --grad-compression int4-gradients rounds gradients, int8-weights the weights that ZeRO stage 3
    gathers (Wang et al. 2023). With error feedback: powersgd (Vogels et al. 2019), low-rank products; onebit-adam (Tang
    et al. 2021), onebit-lamb (Li et al. 2021), zero-one-adam (Lu et al. 2022), signs of momenta or gradients."""

    grad_compression_warmup_iters: int = setting(
        1000, r.COUNT_FROM_0, when=_chosen("powersgd", "onebit-adam", "onebit-lamb"), resume=Resume.FREE
    )
    """Steps before powersgd, onebit-adam and onebit-lamb begin to compress; for the last two use 15 to 25 % of the
    training."""
    powersgd_rank: int = setting(4, r.SIZE, when=_chosen("powersgd"))
    """Rank of the low-rank products of powersgd."""
    onebit_lamb_coeff_beta: float = setting(0.9, r.BELOW_1, when=ONEBIT_LAMB)
    """Decay rate of the mean of LAMB's coefficients in the warm-up of onebit-lamb, of at least 1 / (1 - beta) steps."""
    onebit_lamb_factor_max: float = setting(4.0, r.POSITIVE, when=ONEBIT_LAMB)
    """Upper limit of the factor by which onebit-lamb changes the mean coefficient after the warm-up."""
    onebit_lamb_factor_min: float = setting(0.5, r.POSITIVE, when=ONEBIT_LAMB)
    """Lower limit of the factor by which onebit-lamb changes the mean coefficient after the warm-up."""
    onebit_lamb_factor_threshold: float = setting(0.1, r.UP_TO_1, when=ONEBIT_LAMB)
    """Largest change of this factor in a step, as a share of it."""
    zero_one_var_freeze_step: int = setting(1000, r.COUNT, when=ZERO_ONE_ADAM)
    """Steps in which zero-one-adam sums gradients. Afterwards the variance is frozen and ranks take local steps."""
    zero_one_var_update_scaler: int = setting(16, r.COUNT, when=ZERO_ONE_ADAM)
    """Updates of the variance, with uncompressed gradients, after which zero-one-adam doubles their interval."""
    zero_one_local_step_scaler: int = setting(32_678, r.COUNT, when=ZERO_ONE_ADAM)
    """Local steps after which zero-one-adam doubles the interval of synchronizations: those that halve the rate."""
    zero_one_local_step_clipper: int = setting(16, r.COUNT, when=ZERO_ONE_ADAM)
    """Largest number of local steps between two synchronizations of zero-one-adam."""


def compresses(config: RunConfig) -> bool:
    """Whether a run has one of the kinds of this feature."""
    return any(row.name == config.parallel.grad_compression for row in KINDS)
