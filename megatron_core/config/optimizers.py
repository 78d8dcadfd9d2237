"""All optimizers and their table, without torch.

To add an optimizer, add its settings and a row, here or in a feature; the row names the update rule. The memory model,
checkpoints, sharding and the checks of settings read the row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import Condition, Resume, section, setting
from megatron_core.errors import ConfigError
from megatron_core.feature import features


def read_by(name: str, optimizer: str) -> Condition:
    """The condition that an optimizer of the run, such as ``optimizer``, reads the setting ``name``."""
    return Condition(f"--optimizer {optimizer}", lambda run: any(name in row.settings for row in run.optimizer.kinds))


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class AlgorithmConfig:
    """The choice of the optimizer, and the settings of each optimizer."""

    optimizer: str = setting("adam")
    """adam: AdamW (Loshchilov and Hutter 2019); sgd: with momentum; lion (Chen et al. 2023); muon: orthogonal updates
    of the hidden matrices (Jordan et al. 2024), --muon-scalar-optimizer for the other parameters; adaptive_muon: muon
    with a second moment (AdaMuon, NorMuon); soap: Adam in the eigenbases of Shampoo's factors of the hidden matrices
    (Vyas et al. 2024), --soap-scalar-optimizer for the other parameters; lamb: Adam with steps in proportion to the
    norm of each tensor (You et al. 2019); or an optimizer that a program registers (optimizer.register_optimizer)."""
    adam_beta1: float = setting(0.9, r.BELOW_1, when=read_by("adam_beta1", "adam"))
    """Decay rate of the running mean of gradients."""
    adam_beta2: float = setting(0.999, r.BELOW_1, when=read_by("adam_beta2", "adam"))
    """Decay rate of the running mean of squared gradients."""
    adam_eps: float = setting(1e-8, r.POSITIVE, when=read_by("adam_eps", "adam"))
    """Added to the square root of the mean of squared gradients."""
    adam_bias_correction: bool = setting(True, when=(read_by("adam_bias_correction", "adam"), c.CORRECTS_BIAS))
    """Divide Adam's moments by 1 - beta^step; --no-adam-bias-correction: use them as they are."""
    ema_decay: float | None = setting(None, r.BELOW_1)
    """Also keep an exponential moving average of the weights, e = d e + (1 - d) w after each update, which begins with
    the initial weights. Evaluations report its loss, too; megatron-convert --average exports it."""

    def kind_of(self, *, hidden: bool) -> "OptimizerKind":
        """The optimizer of hidden matrices, or of the other parameters."""
        kinds = optimizer_kinds()
        row = kinds[self.optimizer]
        return row if hidden or row.scalar_optimizer is None else kinds[getattr(self, row.scalar_optimizer)]

    @property
    def bf16_settings(self) -> dict[str, str]:
        """The settings that store main weights or moments in bfloat16, with their values; a feature has them."""
        return {}

    @property
    def kinds(self) -> "tuple[OptimizerKind, ...]":
        """The optimizers of all parameters; none with an unknown name, which the validation reports."""
        try:
            return tuple(dict.fromkeys((self.kind_of(hidden=True), self.kind_of(hidden=False))))
        except KeyError:
            return ()

    @property
    def has_matrix_state(self) -> bool:
        """Whether an optimizer keeps state of whole matrices."""
        return any(row.matrix_elements is not None for row in self.kinds)


@dataclass(frozen=True)
class Moment:
    """A tensor of optimizer state with one element per parameter, initially zero."""

    name: str
    """Its name in the state and, after ``optimizer.``, in checkpoints."""
    dtype_setting: Literal["exp_avg_dtype", "exp_avg_sq_dtype"] | None = "exp_avg_dtype"
    """Setting that may store it in bfloat16; None: always float32 (float64 with --fp64)."""
    absent_at_zero: str | None = None
    """Setting with which the moment does not exist if its value is 0."""

    def exists(self, config: AlgorithmConfig) -> bool:
        """Whether the optimizer stores this moment."""
        return self.absent_at_zero is None or getattr(config, self.absent_at_zero) != 0

    def is_bf16(self, config: AlgorithmConfig) -> bool:
        """Whether the moment is stored in bfloat16."""
        return self.dtype_setting in config.bf16_settings


AVERAGE = Moment("ema", None)
"""The average of the weights with ``ema_decay``, initially the weights."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """A row of the table of optimizers; ``Feature.optimizers`` has the rows of features."""

    name: str
    """The value of --optimizer."""
    all_moments: tuple[Moment, ...]
    """Its moments; see ``moments`` for the ones that a configuration stores."""
    settings: tuple[str, ...] = ()
    """Its own settings, fields of ``AlgorithmConfig``."""
    scalar_optimizer: str | None = None
    """Setting that names the optimizer of embeddings, output layer, norms and biases, for an optimizer that updates
    only hidden matrices, each as a whole; None: this optimizer updates all parameters, element by element."""
    rule: str | None = None
    """Hook: its update rule, a class derived from ``optimizer.rule.Algorithm``; None if a program registers it."""
    matrix_elements: Callable[[Any, tuple[int, ...], int, bool], int] | None = None
    """Elements of state of a whole matrix that its owner has on its device, in float32 or float64, from the settings,
    the rows of each matrix that is stored in it, its columns, and whether these are queries, keys and values."""
    hidden_lr_power: int = -1
    """With --use-mup, the learning rate of hidden matrices is multiplied by (width / base width) to this power (Yang et
    al. 2022, table 8)."""
    other_lr_power: int = 0
    """The same for the other parameters."""
    hidden_eps_power: int = 0
    """The same for ``adam_eps`` in updates of hidden matrices."""

    def moments(self, config: AlgorithmConfig) -> tuple[Moment, ...]:
        """The moments that the optimizer stores with these settings."""
        averages = () if config.ema_decay is None else (AVERAGE,)
        return (*(moment for moment in self.all_moments if moment.exists(config)), *averages)

    def moment_bytes(self, config: AlgorithmConfig, wide: int = 4) -> int:
        """Bytes of state per parameter, without main weights; ``wide``: bytes of a number that is not bfloat16."""
        return sum(2 if moment.is_bf16(config) else wide for moment in self.moments(config))

    def width_factors(self, width: float, *, hidden: bool) -> tuple[float, float]:
        """The factors of --use-mup on learning rate and epsilon at ``width`` times the base width.

        ``hidden``: whether the parameter is a hidden matrix, as opposed to embedding, output layer, bias or norm.
        """
        if not hidden:
            return width**self.other_lr_power, 1.0
        return width**self.hidden_lr_power, width**self.hidden_eps_power


_ADAM = OptimizerKind(
    name="adam",
    rule="megatron_core.optimizer.algorithms:AdamW",
    all_moments=(Moment("exp_avg"), Moment("exp_avg_sq", "exp_avg_sq_dtype")),
    settings=("adam_beta1", "adam_beta2", "adam_eps", "adam_bias_correction"),
    hidden_eps_power=-1,
)
OPTIMIZERS = {_ADAM.name: _ADAM}
"""The optimizer of the core, and those that programs have registered, by name."""


def optimizer_kinds() -> dict[str, OptimizerKind]:
    """All optimizers by name: that of the core, of features, and of programs."""
    added = {row.name: row for feature in features() for row in feature.optimizers}
    return {_ADAM.name: _ADAM} | added | OPTIMIZERS


def add_optimizer(row: OptimizerKind) -> None:
    """Add a row to the table. Errors: ``ConfigError`` if the name is taken."""
    if row.name in optimizer_kinds():
        raise ConfigError(f"optimizer {row.name!r} is already registered; choose another name")
    OPTIMIZERS[row.name] = row


VARIANTS = {
    "muonclip": "--optimizer muon --qk-clip",
    "normuon": "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon",
    "onebitadam": "--optimizer adam --grad-compression onebit-adam",
    "onebitlamb": "--optimizer lamb --grad-compression onebit-lamb",
    "zerooneadam": "--optimizer adam --grad-compression zero-one-adam",
}
"""Names in lower case of algorithms that are another optimizer with a setting."""


def optimizer_problems(config: AlgorithmConfig) -> Iterator[str]:
    """Check that the optimizer is registered."""
    if config.optimizer not in (kinds := optimizer_kinds()):
        variant = VARIANTS.get(config.optimizer.lower())
        legal = f"it is {variant}" if variant else f"legal: {', '.join(kinds)} (adam is AdamW)"
        yield f"optimizer={config.optimizer} is unknown; {legal}"
