"""The weights of adapters: their initial values, and the checkpoints that contain only them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_core.checkpoint.formats import formats_of_settings
from megatron_core.data_parallel import DataParallel
from megatron_core.features.lora.adapters import adapters_of, is_adapter
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.models import GPTModel
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.parts import AddedWeights


class Adapters(AddedWeights):
    """The adapters of all layers."""

    saved_alone = True

    @property
    def title(self) -> str:
        """With their rank."""
        return f"adapters (lora_rank={self.config.section(TuningConfig).lora_rank})"

    def contain(self, name: str) -> bool:
        """Whether a parameter, or a piece of a checkpoint, belongs to an adapter."""
        return is_adapter(name)

    def set_initial(self, data: DataParallel, stages: Sequence[GPTModel]) -> None:
        """Set DoRA's magnitudes, and load the adapters of --lora-load."""
        if self.config.section(TuningConfig).use_dora:
            _assign(data, _magnitudes(data, stages))
        parameters = {name: p for stage in stages for name, p in stage.named_global_parameters() if is_adapter(name)}
        for form, folder in formats_of_settings(self.config):
            if values := form.read_added(folder, self.config, stages[0].vocab_size):
                _assign(data, {parameter: _local(values[name], parameter) for name, parameter in parameters.items()})


def _magnitudes(data: DataParallel, stages: Sequence[GPTModel]) -> dict[nn.Parameter, Tensor]:
    """DoRA's magnitudes: the norms of the rows of the frozen weights."""
    magnitudes: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        for _, linear, adapter in adapters_of(stage):
            assert linear.weight is not None
            with data.gathered([linear.weight, *adapter.lora_A.values(), *adapter.lora_B.values()]):
                magnitudes |= adapter.initial_magnitudes(linear.weight)
    return magnitudes


@torch.no_grad()
def _assign(data: DataParallel, values: Mapping[nn.Parameter, Tensor]) -> None:
    """Set parameters, of which ZeRO 3 keeps a shard, to this rank's ``values``."""
    for parameter, value in values.items():
        bucket = data.bucket_of(parameter)
        if bucket is None or not bucket.splits_weights:
            parameter.data.copy_(value)
            continue
        for _, shard_of, start, stop, offset in bucket.pieces():
            if shard_of is parameter:
                bucket.weight_shard[offset : offset + stop - start] = value.reshape(-1)[start:stop]


def _local(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's value."""
    spec = spec_of(parameter)
    local = torch.empty(spec.local_shape, dtype=parameter.dtype, device=parameter.device)
    spec.localise(value, local)
    return local
