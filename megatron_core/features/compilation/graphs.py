"""Modules whose forward is a graph of torch.compile."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from megatron_core.errors import ConfigError
from megatron_core.parallel.compiled import GRAPHS, DerivedForward
from megatron_core.parallel.groups import SHARED_MEMORY


def keep_out_of_graphs(module: nn.Module) -> None:
    """Run ``module.forward`` without a graph, inside of modules whose forward is compiled."""
    cast(Any, module).forward = DerivedForward(module.forward, torch.compiler.disable)


def compile_forward(
    module: nn.Module, *, fullgraph: bool, backend: str = "inductor", eager_if: Callable[..., bool] | None = None
) -> None:
    """Compile ``module.forward`` at its first call; hooks of the module run outside of the graph.

    ``fullgraph``: an operation that cannot be part of the graph is an error. Otherwise it divides the graph.
    ``eager_if`` gets the arguments of a call and returns whether it runs without a graph.
    Call this before ``DataParallel``, which does not attach hooks inside of the module then.
    Errors: ``ConfigError`` if this release of torch cannot trace the groups of shared memory.
    """
    if fullgraph:
        _check_release()
    config: Any = torch._dynamo.config
    # Otherwise each layer's numbers are constants, and every layer compiles a graph of its own.
    config.allow_unspec_int_on_nn_module = True  # numbers that differ between layers, as the key of dropout
    config.recompile_limit = max(config.recompile_limit, GRAPHS)

    def make(eager: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(eager, fullgraph=fullgraph, backend=backend)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (eager if eager_if is not None and eager_if(*args, **kwargs) else compiled)(*args, **kwargs)

        return forward

    compiled = cast(Any, module)
    compiled.forward = DerivedForward(module.forward, make)
    # Hooks inside of a graph would be traced once and then not run: data parallelism attaches its hooks around such
    # modules.
    compiled.has_graphs = True


def _check_release() -> None:
    if TorchVersion(torch.__version__) >= "2.12" or not dist.is_initialized():
        return
    if dist.get_backend() == SHARED_MEMORY and dist.get_world_size() > 1:
        raise ConfigError(
            f"compile=True over shared memory needs torch 2.12 or newer, and this is {torch.__version__}; add "
            "--distributed-backend gloo, or install a newer torch"
        )
