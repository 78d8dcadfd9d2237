"""torch.compile of layers (--compile)."""

from megatron_core.feature import Feature
from megatron_core.features.compilation.settings import CompilationConfig, compilation_problems, compiles

COMPILATION = Feature(
    name="compilation",
    settings=CompilationConfig,
    is_used=compiles,
    problems=compilation_problems,
    convert_layers="megatron_core.features.compilation.layers:compile_block",
)
