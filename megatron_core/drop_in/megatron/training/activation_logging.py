"""Inputs and outputs of linear layers, and numbers of tokens for each expert, recorded by hooks."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.layer_parts import TopKRouter
from megatron.core.utils import unwrap_model

LINEAR_TYPES = (nn.Linear, nn.Embedding, ColumnParallelLinear, RowParallelLinear, TopKRouter)
_EXPERTS = re.compile(r"(?:decoder|mtp\.layers\.(\d+)\.mtp_model_layer)\.layers\.(\d+)\.mlp\.experts\.linear_fc1")
logger = logging.getLogger(__name__)


class ActivationLogger:
    """Records the activations of the modules of a model."""

    def __init__(self, save_dir: str) -> None:
        self._save_dir = Path(save_dir)
        self._activations_state_dict: dict[str, dict[str, Any]] = defaultdict(dict)
        self._activation_hooks: list[Any] = []
        self._decoder_tpe_records: dict[int, list[list[int]]] = defaultdict(list)
        self._mtp_tpe_records: dict[tuple[int, int], list[list[int]]] = defaultdict(list)

    def register_activation_hooks(self, model: Iterable[nn.Module]) -> None:
        """Record inputs, keyword arguments and outputs of ``LINEAR_TYPES`` in each chunk, on the CPU."""
        assert not self._activation_hooks, "hooks are registered already; call remove_activation_hooks"
        for number, chunk in enumerate(model):
            for name, module in unwrap_model(chunk).named_modules():
                if isinstance(module, LINEAR_TYPES):
                    hook = self._make_activation_hook(f"model_chunk{number}", name)
                    self._activation_hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove_activation_hooks(self) -> None:
        """Stop recording."""
        for hook in self._activation_hooks:
            hook.remove()
        self._activation_hooks.clear()

    def _make_activation_hook(self, model_chunk_name: str, module_name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            values = {f"input{i}": value for i, value in enumerate(inputs) if value is not None}
            values |= {f"output{i}": value for i, value in enumerate(outputs) if isinstance(value, Tensor)} | named
            for name, value in values.items():
                kept = value.detach().cpu() if isinstance(value, Tensor) else value
                self._activations_state_dict[model_chunk_name][f"{module_name}/{name}"] = kept

        return record

    def _make_tpe_hook(self, model_chunk_name: str, module_name: str) -> Callable[..., None] | None:
        """Return a hook that records the second input, the tokens of each expert; None for another module."""
        match = _EXPERTS.fullmatch(module_name)
        if match is None:
            logger.warning("Cannot extract layer number from %r: its tokens are not recorded", module_name)
            return None
        block, layer = match[1], int(match[2])

        def record(module: nn.Module | None, inputs: Any, named: dict[str, Any], output: Any) -> None:
            counts = inputs[1] if len(inputs) > 1 else None
            if counts is not None and not isinstance(counts, Tensor):
                of_layer = (
                    self._decoder_tpe_records[layer] if block is None else self._mtp_tpe_records[int(block), layer]
                )
                of_layer.append(list(counts))

        return record

    def save_tpe(self, iteration: int) -> None:
        """Append the numbers to ``tokens_per_expert/rankN.jsonl``: iteration, block, layer, a row for each batch."""
        lines = [{"block": "decoder", "layer": n, "tpe": t} for n, t in sorted(self._decoder_tpe_records.items())]
        records = sorted(self._mtp_tpe_records.items())
        lines += [{"block": "mtp", "mtp_idx": block, "layer": n, "tpe": t} for (block, n), t in records]
        if not lines:
            return
        path = self._save_dir / "tokens_per_expert" / f"rank{dist.get_rank() if dist.is_initialized() else 0}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps({"iter": iteration} | line) + "\n" for line in lines)
        self._decoder_tpe_records.clear()
        self._mtp_tpe_records.clear()
