"""Rules of compiled layers."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.compilation.settings import CompilationConfig


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
