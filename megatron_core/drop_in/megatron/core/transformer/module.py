"""The base class of modules, and 16-bit models."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.moe.expert_names import split_stacks, whole_stacks
from megatron_core.errors import ConfigError


class MegatronModule(nn.Module):
    """A module with a configuration, which lists its parameters as parts of global tensors."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under Megatron's names, see ``expert_names.name_experts``."""
        yield from split_stacks(self, super().named_parameters(prefix, recurse, remove_duplicate))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that are trained, for optimizers: stacks of experts are not divided."""
        for _, parameter in super().named_parameters(recurse=recurse):
            yield parameter

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of ``parameters``, for data parallelism and checkpoints."""
        yield from super().named_parameters()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return ``state_dict``."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def set_is_first_microbatch(self) -> None:
        """Set ``is_first_microbatch`` of modules that have it: their weights have changed.

        Only with fp8, fp4, use_kitchen or quant_recipe in the configuration.
        """
        if any(getattr(self.config, name, None) for name in ("fp8", "fp4", "use_kitchen", "quant_recipe")):
            module: Any
            for module in self.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return every parameter and saved buffer as a ``ShardedTensor``, by its name in ``state_dict``; see
        ``sharded``."""
        if sharded_offsets:
            raise ConfigError("sharded_offsets is not supported: a ShardSpec describes each parameter; remove it")
        return sharded(self, prefix)


def sharded(module: nn.Module, prefix: str = "") -> dict[str, ShardedTensor]:
    """Return the tensors of ``state_dict`` with their global names, see ``named_global_parameters`` of a model."""
    with_number: Any = getattr(module, "global_name", str)
    named: Any = getattr(module, "named_global_parameters", module.named_parameters)
    names: dict[int, str] = {id(parameter): name for name, parameter in named()}
    found = {}
    with whole_stacks():
        state = module.state_dict(prefix=prefix, keep_vars=True)
    for name, tensor in state.items():
        key = prefix + names.get(id(tensor), with_number(name.removeprefix(prefix)))
        found[name] = ShardedTensor.of(key, tensor)
    return found


def mark_keep_in_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Return ``parameter``, marked so that ``Float16Module`` does not convert it."""
    marked: Any = parameter
    marked.keep_in_fp32 = True
    return parameter


class Float16Module(MegatronModule):
    """A model in float16 or bfloat16: inputs are converted to it, and outputs of the last stage to float32."""

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config)
        if config.fp16 == config.bf16:
            raise ConfigError(f"Float16Module needs one of fp16={config.fp16} and bf16={config.bf16}")
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        kept = [(each, each.data) for each in module.parameters() if getattr(each, "keep_in_fp32", False)]
        self.module = module.to(self.dtype)
        for parameter, data in kept:
            parameter.data = data

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hand on the previous stage's output."""
        inner: Any = self.module
        inner.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's, between casts."""
        outputs = self.module(*_cast(inputs, self.dtype), **_cast(kwargs, self.dtype))
        last = getattr(self.module, "post_process", True)
        return _cast(outputs, torch.float32) if last else outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, without a prefix of this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The module's."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """The module's."""
        return sharded(self.module, prefix)

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's, for data parallelism."""
        named: Any = getattr(self.module, "named_global_parameters", self.module.named_parameters)
        yield from named()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return {name: _cast(item, dtype) for name, item in value.items()} if isinstance(value, dict) else value
