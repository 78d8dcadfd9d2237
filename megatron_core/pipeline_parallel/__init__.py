"""Pipeline schedules as data, and the one executor that runs them.

``get_forward_backward_func`` and ``PipelineParallelLayerLayout`` are handed on when they are asked for: schedules are
free of torch, and importing them must not import torch.
"""

from importlib import import_module

_HOMES = {
    "forward_backward": ("get_forward_backward_func",),
    "layer_layout": ("LayerType", "PipelineParallelLayerLayout"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
