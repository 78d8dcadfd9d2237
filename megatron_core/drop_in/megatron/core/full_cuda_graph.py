"""CUDA graphs of whole training steps, which are not supported."""

from megatron_core.drop_in.unsupported import Unsupported, unsupported

_MESSAGE = "cuda_graph_impl='full_iteration' is not supported; remove it"
get_shared_capture_stream = unsupported(_MESSAGE)


class FullCudaGraphWrapper(Unsupported):
    """A training step as a CUDA graph."""

    message = _MESSAGE
