"""Records the experts that the tokens of sampled texts have chosen."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_core.features.experts.layer import routed_rows
from megatron_core.features.experts.replay import RouterReplay
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.inference.generator import Generator
from megatron_core.inference.scheduler import Segment
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD


class ExpertRecorder:
    """The experts of all tokens that a generator has computed on this rank, by the number of the request."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._model = generator.config.model.section(MoEConfig)
        self._layers = self._model.expert_layers
        self._choices = self._model.moe_router_topk
        self._texts: dict[int, dict[int, Tensor]] = defaultdict(dict)
        """By request and position ``[layers, k]``."""
        generator.router_replay = RouterReplay()

    def observe(self, segments: Sequence[Segment]) -> None:
        """Keep the choices of a step, whose tokens are those of ``segments`` in their order."""
        replay = self._generator.router_replay
        assert replay is not None
        # Layers of other pipeline ranks, and tokens that other tensor-parallel ranks route, are 0 here.
        tokens = sum(segment.count for segment in segments)
        experts = torch.zeros(tokens, len(self._layers), self._choices, dtype=torch.int64)
        own_rows = routed_rows(tokens, self._generator.groups.group("tp"))
        for layer, chosen in replay.choices.items():
            experts[own_rows, self._layers.index(layer)] = chosen[:, 0].cpu()
        rows = iter(experts)
        for segment in segments:
            for position in range(segment.first, segment.first + segment.count):
                self._texts[segment.text.number][position] = next(rows)
        replay.choices.clear()

    def gather(
        self,
        numbers: Mapping[int, int],
        keys: Sequence[int],
        lengths: Sequence[int],
    ) -> list[np.ndarray]:
        """The experts ``[length, layers, k]`` of each answer on all ranks, and forget them.

        ``numbers``: the engine's requests for this rank's answers, by the answers' numbers, which are ``keys`` for all
        answers, with their ``lengths``.
        """
        total = torch.zeros(sum(lengths), len(self._layers), self._choices, dtype=torch.int64)
        for key, part in zip(keys, total.split(list(lengths)), strict=True):
            if key in numbers:
                texts = self._texts.pop(numbers[key], {})
                for position, row in enumerate(part):
                    row.copy_(texts[position])
        on_device = total.to(self._generator.device)
        all_reduce_(on_device, self._generator.groups.group(WORLD))
        small = np.uint8 if (self._model.num_experts or 0) <= 256 else np.int16
        return [part.numpy().astype(small) for part in on_device.cpu().split(list(lengths))]
