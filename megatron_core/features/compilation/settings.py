"""Settings of compiled layers, and their rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config.run import RunConfig
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


def compiles(config: RunConfig) -> bool:
    """Whether a run compiles its layers."""
    return config.section(CompilationConfig).compile


def compilation_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings whose operations cannot be in a graph."""
    model = config.model
    if not compiles(config):
        return
    if any(map(model.recomputes, ("layernorm", "mla_up_proj"))):
        yield (
            f"compile=True with recompute_modules={', '.join(model.recompute_modules)}: a graph cannot discard the "
            "outputs of layernorm and mla_up_proj alone; remove them, or --compile"
        )
    if model.attention_backend == "flex":
        yield (
            "compile=True cannot be used with attention_backend=flex: its kernel cannot be in the graph of a layer; "
            "remove --compile, or use --attention-backend auto"
        )
