"""Text generation with a model that is split over tensor and pipeline ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_core.checkpoint import CheckpointReader, parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.inference.kv_cache import KVCache
from megatron_core.inference.sampling import Sampling, choose
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.models.hf import HuggingFaceReader
from megatron_core.ops.backend import validate_backend
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import broadcast_
from megatron_core.pipeline_parallel.p2p import Links
from megatron_core.schedules.actions import round_robin_stages


@dataclass
class Generator:
    """This rank's stages of a trained model, for generating text."""

    config: RunConfig
    groups: ParallelGroups
    stages: Mapping[int, GPTModel]
    num_stages: int
    device: torch.device

    @classmethod
    def load(
        cls,
        reader: CheckpointReader | HuggingFaceReader,
        config: RunConfig,
        groups: ParallelGroups,
        device: torch.device,
    ) -> Generator:
        """Build the model of ``config`` in the layout of ``groups`` and fill it from a checkpoint."""
        validate_backend(config.model.kernel_backend, device.type, getattr(torch, config.training.compute_dtype))
        layers, stages = build_stages(
            config, groups, reader.state["vocab_size"], device, initialise=False, context_parallel=False
        )
        for model in stages.values():
            reader.fill(parameter_pieces(model.named_global_parameters()))
            model.eval()
        return cls(config, groups, stages, len(layers), device)

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, *, ends: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield new tokens after ``prompt``, up to ``max_new_tokens``, the last position or one of ``ends``.

        Every rank yields the same tokens. ``ConfigError`` for a prompt without tokens or longer than the model allows.
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
            if token in ends:
                return
            pending = [token]

    def room_after(self, prompt: int) -> int | None:
        """Number of learned positions left after ``prompt`` tokens; None if positions are not learned."""
        if self.config.model.position_embedding_type != "learned_absolute":
            return None
        return max(self.config.max_positions - prompt, 0)

    def _next_token(
        self, tokens: Sequence[int], cache: KVCache, links: Links, sampling: Sampling, random: torch.Generator
    ) -> int:
        """Run ``tokens`` through all stages; the rank of the last one samples the next token and broadcasts it."""
        ids = torch.tensor([list(tokens)], device=self.device)
        stage_to_rank = round_robin_stages(self.groups.size("pp"), self.num_stages // self.groups.size("pp"))
        positions = torch.arange(cache.length, cache.length + len(tokens), device=self.device)
        hidden, chosen = None, torch.zeros(1, dtype=torch.int64, device=self.device)
        for stage, rank in enumerate(stage_to_rank):
            if rank != links.index:
                continue
            if stage and stage_to_rank[stage - 1] != rank:
                hidden = self._receive(len(tokens), links, stage_to_rank[stage - 1])
            output = self.stages[stage](ids, hidden_states=hidden, cache=cache, positions=positions)
            if stage == self.num_stages - 1:
                chosen[0] = choose(output[0, -1].cpu(), sampling, random)
            elif stage_to_rank[stage + 1] != rank:
                links.send(output.contiguous(), stage_to_rank[stage + 1]).wait()
            else:
                hidden = output
        broadcast_(chosen, self.groups.ranks("pp")[stage_to_rank[-1]], self.groups.group("pp"))
        return int(chosen)

    def _receive(self, length: int, links: Links, sender: int) -> torch.Tensor:
        shape = (length, 1, self.config.model.hidden_size)
        dtype = getattr(torch, self.config.training.compute_dtype)
        hidden, handle = links.receive(shape, dtype, self.device, sender)
        handle.wait()
        return hidden


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The part of ``text`` that can be printed now, and whether one of ``stops`` ends it there.

    Not printed yet: an incomplete UTF-8 character (U+FFFD at the end), and the beginning of a possible stop string.
    """
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[: min(found)], True
    text = text.rstrip("\ufffd")
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(begun, default=0)], False
