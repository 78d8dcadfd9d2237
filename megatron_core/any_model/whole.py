"""Whole weights, gradients and optimizer state of single parameters, which ZeRO keeps in shards."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.errors import ConfigError
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.collectives import all_reduce_, broadcast_
from megatron_core.parallel.groups import process_group
from megatron_core.parallel.sharding import DATA_AXES, spec_of

KEPT_ELSEWHERE = (
    "since megatron_core.initialize, but its weights are kept elsewhere and would undo the change; write into it with "
    "copy_ inside of engine.gathered(parameter, modify=True)"
)


class WholeTensors:
    """Reads and writes whole tensors of parameters at every ZeRO stage.

    All methods are collectives: all ranks call them with the same parameters, and write equal values. Tensors have the
    shape of the parameter and are on its device.
    """

    def __init__(self, data: DataParallel, optimizer: Optimizer) -> None:
        self._data = data
        self._optimizer = optimizer
        self._shards = {shard.bucket: shard for shard in optimizer.shards}
        self._split = [bucket for bucket in data.all_buckets if bucket.splits_weights]
        for bucket in self._split:
            setattr(bucket.freed, "release", partial(self._note_and_release, bucket, bucket.freed.release))  # noqa: B010
        self.is_open = False
        """Whether a context of ``gathered`` is open."""
        self.accept_weights()

    @contextmanager
    def gathered(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, *, modify: bool = False, source: int = 0
    ) -> Iterator[None]:
        """Keep the weights of ``parameters`` whole inside the context.

        With ``modify``, the weights of the data-parallel rank ``source`` at the end are stored on all ranks, and main
        weights follow where the weights changed. Without it, do not change the weights.
        """
        chosen = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        for parameter in chosen:
            _check_parameter(parameter)
        size = self._data.groups.size("dp")
        if not 0 <= source < size:
            raise ConfigError(f"source={source} must be a data-parallel rank from 0 to {size - 1}")
        self._optimizer.synchronize()
        if modify:
            self._optimizer.before_update()  # a checkpoint may still be copied in the background
        before = self.is_open
        self.is_open = True
        try:
            with self._data.gathered(chosen):
                yield
                if modify:
                    for parameter in chosen:
                        self._keep(parameter, source)
        finally:
            self.is_open = before

    def accept_weights(self) -> None:
        """Take the present weights as those of the engine."""
        parameters = [parameter for bucket in self._data.all_buckets for parameter in bucket.parameters]
        self._versions = {parameter: parameter._version for parameter in parameters}
        self._changed: set[nn.Parameter] = set()
        self._has_new_versions = False
        """Whether gathered weights were compared since the last step; equal on ranks that run the same program."""

    def check_unchanged(self) -> None:
        """ConfigError if the program has replaced the memory of weights, or changed copies, which a step overwrites.

        All ranks call it together.
        """
        for bucket in self._data.all_buckets:
            shard = self._shards.get(bucket)
            if bucket.splits_weights:
                if bucket.is_whole:
                    self._note_changes(bucket)
                continue
            memory = bucket.weights.untyped_storage()._cdata
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                if parameter.untyped_storage()._cdata != memory:
                    raise ConfigError(f"{name} was moved to other memory {KEPT_ELSEWHERE}")
                if shard is not None and shard.is_narrow and parameter._version != self._versions[parameter]:
                    raise ConfigError(f"{name} was changed in place {KEPT_ELSEWHERE}")
        if self._has_new_versions:  # otherwise a step needs no collective call for it
            self._has_new_versions = False
            self._check_split()

    def _check_split(self) -> None:
        """ConfigError on all ranks if the program has changed gathered weights; each rank has compared its own part."""
        named = [pair for bucket in self._split for pair in zip(bucket.names, bucket.parameters, strict=True)]
        changed = [float(parameter in self._changed) for _, parameter in named]
        count = torch.tensor(changed, device=self._split[0].weights.device)
        all_reduce_(count, self._data.groups.group("dp"))
        if count.any():
            raise ConfigError(f"{named[int(count.argmax())][0]} was changed in place {KEPT_ELSEWHERE}")

    def _note_and_release(self, bucket: Bucket, release: Callable[[], Tensor]) -> Tensor:
        self._note_changes(bucket)
        return release()

    @torch.no_grad()
    def _note_changes(self, bucket: Bucket) -> None:
        """Note the gathered weights whose elements differ from this rank's shard.

        Not every new version is a change: ``nn.utils.parametrize``, by which peft adapts experts, sets the same memory.
        """
        for parameter in bucket.parameters:
            if parameter._version == self._versions[parameter]:
                continue
            self._versions[parameter] = parameter._version
            self._has_new_versions = True
            with torch._C.DisableTorchFunctionSubclass():
                elements = parameter.data.reshape(-1)
                for start, stop, offset in _pieces(bucket, parameter):
                    shard = bucket.weight_shard[offset : offset + stop - start].to(elements.device)
                    if not torch.equal(elements[start:stop], shard):
                        self._changed.add(parameter)

    @torch.no_grad()
    def _keep(self, parameter: nn.Parameter, source: int) -> None:
        """Store the weights of ``source`` in the shards of all ranks."""
        # The experts of other expert-parallel ranks are other ones: theirs stay.
        axes = "dp" if spec_of(parameter).replica_axes == DATA_AXES else "edp"
        group = self._data.groups.group(axes)
        if group.size() > 1:
            contiguous = parameter.data.contiguous()
            index = source if axes == "dp" else source // self._data.groups.size("ep")
            broadcast_(contiguous, dist.get_global_rank(process_group(group), index), group)
            parameter.data.copy_(contiguous)
        bucket = self._data.bucket_of(parameter)
        if bucket is None:
            return
        self._versions[parameter] = parameter._version
        self._changed.discard(parameter)
        self._write(bucket, parameter, parameter.data, bucket.weight_shard)
        shard = self._shards.get(bucket)
        if shard is not None and shard.is_narrow:
            # Main weights keep their additional bits where the weights did not change.
            main = self._read(bucket, parameter, shard.main)
            same = main.to(parameter.dtype) == parameter.data
            self._write(bucket, parameter, torch.where(same, main, parameter.data.to(main.dtype)), shard.main)

    @torch.no_grad()
    def weights(self, parameter: nn.Parameter) -> Tensor:
        """Return the main weights: float32 for 16-bit weights, else the weights."""
        bucket = self._trained(parameter)
        shard = self._shards[bucket]
        self._optimizer.synchronize()
        return self._read(bucket, parameter, shard.main if shard.is_narrow else bucket.weight_shard)

    @torch.no_grad()
    def set_weights(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the main weights and the weights by ``value``."""
        bucket = self._trained(parameter)
        shard = self._shards[bucket]
        self._optimizer.synchronize()
        self._optimizer.before_update()
        self._data.finish_param_sync()
        if shard.is_narrow:
            self._write(bucket, parameter, value, shard.main)
        self._write(bucket, parameter, value, bucket.weight_shard)
        if bucket.is_whole:
            parameter.data.copy_(value)

    @torch.no_grad()
    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of the gradients of the step so far over all ranks, without the loss scale and clipping.

        With ``num_terms``, it is the gradient of the sum of losses, before the division by the number of terms.
        """
        bucket = self._trained(parameter)
        bucket.finish_reduce()
        if bucket.splits_grads or bucket.reduced:
            total = self._read(bucket, parameter, bucket.grad_shard)
            if bucket.is_sharded:
                all_reduce_(total, bucket.instances)
        else:
            total = _grad_of(parameter).clone()
            all_reduce_(total, self._data.groups.group("-".join(bucket.kind.replica_axes)))
        return total.div_(self._optimizer.loss_scale.scale)

    @torch.no_grad()
    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the sum of the gradients over all ranks by ``value``; call it before ``step``."""
        bucket = self._trained(parameter)
        bucket.finish_reduce()
        scaled = value.to(bucket.grads.dtype) * self._optimizer.loss_scale.scale
        # Later sums over ranks must give the value: the first rank stores it, and the others store zeros.
        nothing = torch.zeros_like(scaled)
        is_first = bucket.instances.rank() == 0
        if bucket.splits_grads or bucket.reduced:
            self._write(bucket, parameter, scaled if is_first else nothing, bucket.grad_shard)
        else:
            _grad_of(parameter).copy_(scaled if is_first and bucket.dp_group.rank() == 0 else nothing)

    def state_names(self, parameter: nn.Parameter) -> list[str]:
        """Return the names of the optimizer's state, such as ``exp_avg`` and ``exp_avg_sq`` of AdamW."""
        return list(self._shards[self._trained(parameter)].state)

    @torch.no_grad()
    def state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return the optimizer state ``name``; see ``state_names``."""
        bucket = self._trained(parameter)
        return self._read(bucket, parameter, self._state(bucket, name))

    @torch.no_grad()
    def set_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Replace the optimizer state ``name`` by ``value``."""
        bucket = self._trained(parameter)
        self._optimizer.before_update()
        self._write(bucket, parameter, value, self._state(bucket, name))

    def _state(self, bucket: Bucket, name: str) -> Tensor:
        state = self._shards[bucket].state
        if name not in state:
            raise ConfigError(
                f"optimizer state {name!r} does not exist; this optimizer has {', '.join(state) or 'none'}"
            )
        return state[name]

    def _trained(self, parameter: nn.Parameter) -> Bucket:
        _check_parameter(parameter)
        bucket = self._data.bucket_of(parameter)
        if bucket is None or bucket not in self._shards:
            raise ConfigError(
                f"the parameter of shape {tuple(parameter.shape)} is not trained by this engine: it has no gradient "
                "and no optimizer state; pass a parameter of the model with requires_grad=True"
            )
        return bucket

    @staticmethod
    def _read(bucket: Bucket, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        """Assemble a parameter's tensor from the shards ``flat`` of all ranks."""
        gathered = torch.zeros(parameter.numel(), dtype=flat.dtype, device=bucket.weights.device)
        for start, stop, offset in _pieces(bucket, parameter):
            gathered[start:stop] = flat[offset : offset + stop - start]
        if bucket.is_sharded:
            all_reduce_(gathered, bucket.dp_group)  # exact: the other ranks have zeros
        return gathered.view(parameter.shape)

    @staticmethod
    def _write(bucket: Bucket, parameter: nn.Parameter, tensor: Tensor, flat: Tensor) -> None:
        """Copy this rank's part of ``tensor`` to the shard ``flat``."""
        if tensor.shape != parameter.shape:
            raise ConfigError(f"value of shape {tuple(tensor.shape)} must have the shape {tuple(parameter.shape)}")
        source = tensor.reshape(-1)
        for start, stop, offset in _pieces(bucket, parameter):
            flat[offset : offset + stop - start].copy_(source[start:stop])


def _grad_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's gradient, a view of the bucket."""
    return vars(parameter)["main_grad"]


def _pieces(bucket: Bucket, parameter: nn.Parameter) -> Iterator[tuple[int, int, int]]:
    """Yield (first element, end, offset in the shard) of the parts of ``parameter`` in this rank's shard."""
    return ((start, stop, offset) for _, owner, start, stop, offset in bucket.pieces() if owner is parameter)


def _check_parameter(parameter: object) -> None:
    if not isinstance(parameter, Tensor):
        raise ConfigError(f"{parameter!r} must be a parameter of the model, not a {type(parameter).__name__}")
