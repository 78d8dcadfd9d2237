"""Settings of compiled layers."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config.setting import given, section, setting, without
from megatron_core.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
@section()
class CompilationConfig(TrainingConfig):
    """Layers as graphs of torch.compile."""

    compile: bool = setting(False, needs=without("fp8_format"), when=c.TRAINING)
    """Compile each layer with torch.compile. Attention of packed documents or over CP ranks, and experts, stay eager
    between the graphs of a layer."""
    compile_backend: Literal["inductor", "aot_eager", "eager"] = setting("inductor", needs=given("compile"))
    """inductor: generate code. aot_eager, eager: run the operators of the graphs, to find the cause of a fault: with
    and without graphs of the backward."""
