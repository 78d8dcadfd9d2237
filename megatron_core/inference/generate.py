"""Text generation with a model that is split over tensor and pipeline ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_core.checkpoint import CheckpointReader, parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.inference.kv_cache import KVCache
from megatron_core.inference.sampling import Sampling, choose
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import broadcast_
from megatron_core.pipeline_parallel.actions import placed_round_robin
from megatron_core.pipeline_parallel.p2p import Links


@dataclass
class Generator:
    """This rank's part of a trained model, ready to continue token sequences."""

    config: RunConfig
    groups: ParallelGroups
    stages: Mapping[int, GPTModel]
    num_stages: int
    device: torch.device

    @classmethod
    def load(
        cls, reader: CheckpointReader, config: RunConfig, groups: ParallelGroups, device: torch.device
    ) -> Generator:
        """Build the model of ``config`` in the layout of ``groups`` and fill it from a checkpoint."""
        layers, stages = build_stages(config, groups, reader.state["vocab_size"], device, initialise=False)
        for model in stages.values():
            reader.fill(parameter_pieces(model.named_global_parameters()))
            model.eval()
        return cls(config, groups, stages, len(layers), device)

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, *, end: int | None = None
    ) -> Iterator[int]:
        """Yield new tokens after ``prompt`` until ``max_new_tokens``, the last position or the token ``end``.

        Every rank yields the same.
        """
        room = self.room_after(len(prompt))
        if not prompt:
            raise ConfigError("the prompt has no token; give at least one character")
        if room == 0:
            raise ConfigError(
                f"the prompt's {len(prompt)} tokens leave no room in the {self.config.max_positions} positions of this "
                "model; give a shorter prompt"
            )
        max_new_tokens = max_new_tokens if room is None else min(max_new_tokens, room)
        cache = KVCache(len(prompt) + max_new_tokens)
        random = torch.Generator().manual_seed(sampling.seed)
        links = Links(self.groups)
        pending = list(prompt)
        for _ in range(max_new_tokens):
            token = self._next_token(pending, cache, links, sampling, random)
            cache.advance(len(pending))
            yield token
            if token == end:
                return
            pending = [token]

    def room_after(self, prompt: int) -> int | None:
        """Tokens that fit behind ``prompt`` tokens into the table of learned positions; None: no such limit."""
        if self.config.model.position_embedding_type != "learned_absolute":
            return None
        return max(self.config.max_positions - prompt, 0)

    def _next_token(
        self, tokens: Sequence[int], cache: KVCache, links: Links, sampling: Sampling, random: torch.Generator
    ) -> int:
        """Run ``tokens`` through all stages; the last one's rank chooses, and the choice goes to all."""
        ids = torch.tensor([list(tokens)], device=self.device)
        place = placed_round_robin(self.groups.size("pp"), self.num_stages // self.groups.size("pp"))
        hidden, chosen = None, torch.zeros(1, dtype=torch.int64, device=self.device)
        for stage, rank in enumerate(place):
            if rank != links.index:
                continue
            if stage and place[stage - 1] != rank:
                hidden = self._receive(len(tokens), links, place[stage - 1])
            output = self.stages[stage](ids, hidden_states=hidden, cache=cache, first_position=cache.length)
            if stage == self.num_stages - 1:
                chosen[0] = choose(output[0, -1].cpu(), sampling, random)
            elif place[stage + 1] != rank:
                links.send(output.contiguous(), place[stage + 1]).wait()
            else:
                hidden = output
        broadcast_(chosen, self.groups.ranks("pp")[place[-1]], self.groups.group("pp"))
        return int(chosen)

    def _receive(self, length: int, links: Links, sender: int) -> torch.Tensor:
        shape = (length, 1, self.config.model.hidden_size)
        dtype = getattr(torch, self.config.training.compute_dtype)
        hidden, handle = links.receive(shape, dtype, self.device, sender)
        handle.wait()
        return hidden
