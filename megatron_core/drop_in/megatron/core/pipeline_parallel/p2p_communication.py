"""Messages between neighbouring pipeline stages, for schedules of the caller.

All ranks call the same functions in the same order. Without ``variable_seq_lengths`` the receiver passes the shape;
with it the shape is sent first. Received tensors require gradients.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import Group

Shape = Sequence[int]
_DIMENSIONS = 3


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is one shape rather than a list of shapes."""
    return isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(size, int) for size in x)


class P2PCommunicator:
    """Sends and receives between this rank of ``pp_group`` and its neighbours in a ring.

    ``is_first_stage`` and ``is_last_stage`` default to this rank's place in the pipeline.
    """

    def __init__(self, pp_group: Group, config: Any) -> None:
        self.pp_group, self.config = pp_group, config
        rank, size = pp_group.rank(), pp_group.size()
        ranks = dist.get_process_group_ranks(pp_group) if isinstance(pp_group, dist.ProcessGroup) else [0] * size
        self.next_rank, self.prev_rank = ranks[(rank + 1) % size], ranks[(rank - 1) % size]
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank is the first of the pipeline."""
        return self.current_stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank is the last of the pipeline."""
        return self.current_stage == self.total_stages - 1

    @property
    def total_stages(self) -> int:
        """The number of pipeline ranks."""
        return self.pp_group.size()

    @property
    def current_stage(self) -> int:
        """This rank's index in the pipeline."""
        return self.pp_group.rank()

    def _exchange(
        self, to_next: Tensor | None, to_prev: Tensor | None, from_prev: Tensor | None, from_next: Tensor | None
    ) -> list[Any]:
        """Start the messages; messages to the next rank come first, so that they also match between only two ranks."""
        if not isinstance(self.pp_group, dist.ProcessGroup):
            raise LayoutError(
                "a pipeline of one rank without torch.distributed has no neighbours; initialize torch.distributed"
            )
        given = (
            (dist.isend, to_next, self.next_rank),
            (dist.irecv, from_prev, self.prev_rank),
            (dist.isend, to_prev, self.prev_rank),
            (dist.irecv, from_next, self.next_rank),
        )
        ops = [
            dist.P2POp(call, tensor.detach(), rank, self.pp_group) for call, tensor, rank in given if tensor is not None
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None = None,
        tensor_send_prev: Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        tensor_shape: Shape | None = None,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, list[Any] | None]:
        """Return the tensors from the previous and the next rank, and the handles without ``wait_on_reqs``."""
        to_next, to_prev = (None if x is None else x.contiguous() for x in (tensor_send_next, tensor_send_prev))
        shapes = self._shapes(to_next, to_prev, (recv_prev, recv_next), tensor_shape)
        from_prev, from_next = (self._empty(shape) for shape in shapes)
        handles = self._exchange(to_next, to_prev, from_prev, from_next)
        if wait_on_reqs:
            for handle in handles:
                handle.wait()
        return from_prev, from_next, None if wait_on_reqs else handles

    def _shapes(
        self,
        to_next: Tensor | None,
        to_prev: Tensor | None,
        wanted: tuple[bool, bool],
        tensor_shape: Shape | None,
    ) -> list[Shape | None]:
        """Return the shapes from the previous and the next rank; None if nothing is received."""
        if not self.config.variable_seq_lengths:
            if tensor_shape is None and any(wanted):
                raise ConfigError("tensor_shape=None: give the shape (sequence, batch, hidden) of the received tensor")
            return [tensor_shape if want else None for want in wanted]
        next_shape, prev_shape = (
            None if x is None else torch.tensor(x.shape, device=self._device()) for x in (to_next, to_prev)
        )
        empty = torch.empty(_DIMENSIONS, dtype=torch.int64, device=self._device())
        found = [empty.clone() if want else None for want in wanted]
        for handle in self._exchange(next_shape, prev_shape, found[0], found[1]):
            handle.wait()
        return [None if shape is None else shape.tolist() for shape in found]

    def _empty(self, shape: Shape | None) -> Tensor | None:
        if shape is None:
            return None
        dtype = self.config.pipeline_dtype
        if dtype is None:
            raise ConfigError("pipeline_dtype=None: give the dtype of messages between stages, such as params_dtype")
        return torch.empty(tuple(shape), dtype=dtype, device=self._device(), requires_grad=True)

    def _device(self) -> torch.device:
        on_gpu = isinstance(self.pp_group, dist.ProcessGroup) and dist.get_backend(self.pp_group) == "nccl"
        return torch.device(torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _receive(self, shapes: Any, is_end: bool, neighbour: str) -> Any:
        listed = [shapes] if is_single_shape(shapes) or shapes is None else shapes
        given: dict[str, Any] = {f"recv_{neighbour}": True}
        found = [
            None if is_end else self._communicate(tensor_shape=shape, **given)[neighbour == "next"] for shape in listed
        ]
        return found if listed is shapes else found[0]

    def _send(self, tensors: Any, is_end: bool, neighbour: str) -> None:
        for tensor in [] if is_end else _listed(tensors):
            self._communicate(**{f"tensor_send_{neighbour}": tensor})

    def _send_and_receive(self, tensors: Any, shapes: Any, is_end: bool, neighbour: str) -> Any:
        found = []
        for tensor, shape in zip(_listed(tensors), shapes if isinstance(shapes, list) else [shapes], strict=True):
            given: dict[str, Any] = {f"tensor_send_{neighbour}": tensor, f"recv_{neighbour}": True}
            silent = is_end or tensor is None
            found.append(None if silent else self._communicate(tensor_shape=shape, **given)[neighbour == "next"])
        return found if isinstance(tensors, list) else found[0]

    def _first(self, is_first_stage: bool | None) -> bool:
        return self.is_pp_first_stage if is_first_stage is None else is_first_stage

    def _last(self, is_last_stage: bool | None) -> bool:
        return self.is_pp_last_stage if is_last_stage is None else is_last_stage

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool | None = None) -> Any:
        """Receive the output of the previous stage, or a list for a list of shapes; None on the first stage."""
        return self._receive(tensor_shapes, self._first(is_first_stage), "prev")

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool | None = None) -> Any:
        """Receive the gradient from the next stage, or a list for a list of shapes; None on the last stage."""
        return self._receive(tensor_shapes, self._last(is_last_stage), "next")

    def send_forward(self, output_tensors: Any, is_last_stage: bool | None = None) -> None:
        """Send outputs to the next stage; nothing on the last stage."""
        self._send(output_tensors, self._last(is_last_stage), "next")

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool | None = None) -> None:
        """Send gradients to the previous stage; nothing on the first stage."""
        self._send(input_tensor_grads, self._first(is_first_stage), "prev")

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool | None = None
    ) -> Any:
        """Send outputs to the next stage and receive their gradients."""
        return self._send_and_receive(output_tensors, tensor_shapes, self._last(is_last_stage), "next")

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool | None = None
    ) -> Any:
        """Send gradients to the previous stage and receive its next output."""
        return self._send_and_receive(input_tensor_grads, tensor_shapes, self._first(is_first_stage), "prev")

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send to the next stage and receive from the previous stage; with overlap return (tensor, handles)."""
        given: dict[str, Any] = {"tensor_send_next": output_tensor, "recv_prev": recv_prev}
        found, _, handles = self._communicate(**given, tensor_shape=tensor_shape, wait_on_reqs=not overlap_p2p_comm)
        return (found, handles) if overlap_p2p_comm else found

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send to the previous stage and receive from the next stage; with overlap return (tensor, handles)."""
        given: dict[str, Any] = {"tensor_send_prev": input_tensor_grad, "recv_next": recv_next}
        _, found, handles = self._communicate(**given, tensor_shape=tensor_shape, wait_on_reqs=not overlap_p2p_comm)
        return (found, handles) if overlap_p2p_comm else found

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send in both directions and receive from the previous and the next stage."""
        sent: dict[str, Any] = {"tensor_send_next": output_tensor, "tensor_send_prev": input_tensor_grad}
        return self._communicate(**sent, recv_prev=recv_prev, recv_next=recv_next, tensor_shape=tensor_shape)[:2]


def _listed(tensors: Any) -> list[Any]:
    return tensors if isinstance(tensors, list) else [tensors]


def _function(name: str) -> Any:
    """Return the function of releases before 0.14 over the current pipeline: a method with ``config`` before its
    defaults.
    """
    method = getattr(P2PCommunicator, name)
    _, *own = inspect.signature(method).parameters.values()
    required = [each for each in own if each.default is each.empty]
    config = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([*required, config, *own[len(required) :]])

    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return method(P2PCommunicator(current().group("pp"), given.pop("config")), **given)

    function.__name__, function.__doc__ = name, method.__doc__
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


recv_forward, recv_backward = _function("recv_forward"), _function("recv_backward")
send_forward, send_backward = _function("send_forward"), _function("send_backward")
send_forward_recv_backward = _function("send_forward_recv_backward")
send_backward_recv_forward = _function("send_backward_recv_forward")
send_forward_recv_forward = _function("send_forward_recv_forward")
send_backward_recv_backward = _function("send_backward_recv_backward")
send_forward_backward_recv_forward_backward = _function("send_forward_backward_recv_forward_backward")
