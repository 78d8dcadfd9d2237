"""Settings of distillation."""

from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=given("kd_teacher", "FOLDER"), resume=Resume.REPORTED)
class DistillationConfig:
    """Learning from a teacher."""

    kd_teacher: str | None = setting(None, r.FOLDER, when=ALWAYS, aliases="export_kd_teacher_load")
    """Learn the distribution of tokens of a frozen teacher: folder of --save, of Megatron-LM or of Hugging Face,
    with a model of any size and the same vocabulary (docs/fine_tune.md)."""
    kd_weight: float = setting(1.0, r.UP_TO_1)
    """Weight w of the teacher in the loss (1 - w) cross entropy + w T^2 KL(teacher || student)."""
    # The gradient is proportional to T if T is small. If it is large, T^2 KL is the rounding error of float32.
    kd_temperature: float = setting(1.0, r.between(0.01, 100))
    """Temperature T, by which the logits of teacher and student are divided."""
