"""CUDA graphs of layers by hand, which the settings of a run capture here instead."""

from typing import ClassVar

from megatron_core.drop_in.unsupported import Unsupported


class CudaGraphManager(Unsupported):
    """Not supported: ``--cuda-graph-scope`` captures the layers."""

    message: ClassVar[str] = "CudaGraphManager is not supported; give --cuda-graph-scope to capture layers"


class TECudaGraphHelper(CudaGraphManager):
    """Not supported: ``--cuda-graph-scope`` captures the layers."""


def is_graph_capturing() -> bool:
    """Return False: no graph is captured by hand."""
    return False


def delete_cuda_graphs() -> None:
    """Do nothing: no graph is captured by hand."""
