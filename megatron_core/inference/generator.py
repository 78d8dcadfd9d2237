"""A trained model split over tensor and pipeline ranks: loading, and forward of new tokens of several sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_core.checkpoint import parameter_pieces
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import RunConfig
from megatron_core.config.attention import AttentionKind
from megatron_core.config.mixers import mixer_of
from megatron_core.config.rules_parallel import parallel_problems
from megatron_core.errors import ConfigError
from megatron_core.features.equal_bits.kernels import check_same_kernels
from megatron_core.features.equal_bits.rules import invariance_problems
from megatron_core.features.experts.replay import RouterReplay
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.inference.kv_cache import CachedSpan, KVCache
from megatron_core.inference.sampling import Losses
from megatron_core.inference.settings import GenerationLayout
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.models.gpt.model import HeadOptions
from megatron_core.ops.backend import validate_backend
from megatron_core.parallel import ParallelGroups, World, start_world
from megatron_core.parallel.configured import make_groups
from megatron_core.parallel.groups import ALONE
from megatron_core.pipeline_parallel.p2p import MessageHandle, PipelineP2P
from megatron_core.schedules.actions import round_robin_stages
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
from megatron_core.tensor_parallel.layers import vocabulary_per_rank
from megatron_core.tokenizers import Tokenizer, tokenizer_of
from megatron_core.transformer.context import ForwardState

Message = tuple[Tensor, MessageHandle]
"""A message under way; its tensor must neither change nor be freed."""


@dataclass
class Generator:
    """This rank's stages of a trained model, for generating text."""

    config: RunConfig
    groups: ParallelGroups
    stages: Mapping[int, GPTModel]
    num_stages: int
    vocab_size: int
    device: torch.device
    ids_before_prompt: tuple[int, ...] = ()
    """Tokens with which the texts of the model's training began."""
    router_replay: RouterReplay | None = None
    """Records the experts that the tokens of the last ``run`` have chosen on this rank, if given."""

    def __post_init__(self) -> None:
        pipeline = self.groups.size("pp")
        self._stage_to_rank = round_robin_stages(pipeline, self.num_stages // pipeline)
        self._p2p = PipelineP2P(self.groups)

    @classmethod
    def load(
        cls,
        reader: StateReader,
        config: RunConfig,
        groups: ParallelGroups,
        device: torch.device,
    ) -> "Generator":
        """Build the model of ``config`` in the layout of ``groups`` and fill it from a checkpoint."""
        # With FP8, scales would depend on the number of positions per forward; stored weights have more bits.
        config = config.with_section(replace(config.section(FP8Config), fp8_format=None))
        validate_backend(config.model.kernel_backend, device.type, getattr(torch, config.training.compute_dtype))
        vocab_size = reader.state["vocab_size"]
        layers, stages = build_stages(config, groups, vocab_size, device, initialise=False, context_parallel=False)
        for model in stages.values():
            reader.fill(parameter_pieces(model.named_global_parameters()))
            model.eval()
        return cls(config, groups, stages, len(layers), vocab_size, device)

    def before_prompt(self, ids: Sequence[int]) -> list[int]:
        """The tokens of a prompt, given as text, after the tokens with which a text begins, unless it has them."""
        before = list(self.ids_before_prompt)
        return [*ids] if [*ids[: len(before)]] == before else [*before, *ids]

    @property
    def learned_positions(self) -> int | None:
        """Number of learned positions; None if positions are not learned."""
        learned = self.config.model.position_embedding_type == "learned_absolute"
        return self.config.max_positions if learned else None

    def scale_to(self, longest: int | None) -> None:
        """Choose the factors of LongRoPE for texts up to ``longest`` tokens; None: the model's positions."""
        if self.config.model.longest_text_scales_rotary:
            for model in self.stages.values():
                model.max_sequence_length = self.config.max_positions if longest is None else longest

    @property
    def bytes_per_position(self) -> int:
        """Memory of the keys and values of one position in the layers of this rank."""
        tp = self.groups.size("tp")
        # With --layout-invariant, each canonical part of the heads has its own copy of its keys and values.
        head_parts = max(self.config.invariant_parts, tp) if self.config.parallel.layout_invariant else tp
        elements = sum(mixer.cached_elements(head_parts) for mixer in self._mixers) * (head_parts // tp)
        return elements * getattr(torch, self.config.training.compute_dtype).itemsize

    @property
    def bytes_per_text(self) -> int:
        """Memory of the states of a text in the recurrent layers of this rank; states are at least in float32."""
        size = max(getattr(torch, self.config.training.compute_dtype).itemsize, 4)
        return size * sum(mixer.state_elements(self.groups.size("tp")) for mixer in self._mixers)

    @property
    def _mixers(self) -> list[AttentionKind]:
        """The kinds of the layers of this rank."""
        numbers = [number for stage in self.stages.values() for number in stage.decoder.layer_numbers]
        return [mixer_of(self.config.model, number) for number in numbers]

    @property
    def losses(self) -> Losses | None:
        """The loss of training of rows of logits, with its bits; None without ``layout_invariant``."""
        return self._losses if self.config.parallel.layout_invariant else None

    def _losses(self, logits: Tensor, tokens: Tensor) -> Tensor:
        model = self.config.model
        head_parts = self.config.invariant_parts
        padded = vocabulary_per_rank(self.vocab_size, model.make_vocab_size_divisible_by * head_parts, 1)
        return vocab_parallel_cross_entropy(
            nn.functional.pad(logits, (0, padded - self.vocab_size)),
            tokens,
            tp_group=ALONE,
            vocab_size=self.vocab_size,
            backend=model.kernel_backend,
            num_parts=head_parts,
        )

    @torch.inference_mode()
    def run(
        self, ids: Sequence[int], spans: Sequence[CachedSpan], cache: KVCache, logit_rows: Sequence[int] | None
    ) -> tuple[Tensor | None, list[Message]]:
        """Run the tokens ``ids`` of ``spans`` through this rank's stages, and add them to ``cache``.

        Returns logits ``[rows, vocabulary]`` after the tokens ``logit_rows`` (None: all), or None on ranks without the
        last stage; and the messages that this rank has sent, whose tensors must be kept until they are complete.
        """
        positions = cache.begin(spans)
        row = torch.tensor([ids], device=self.device)
        head = HeadOptions()
        if logit_rows is not None:
            head = HeadOptions(logit_positions=torch.tensor([logit_rows], device=self.device))
        this_rank = self._p2p.index
        hidden = None
        logits = None
        sent = []
        for stage, rank in enumerate(self._stage_to_rank):
            if rank != this_rank:
                continue
            if stage and self._stage_to_rank[stage - 1] != rank:
                hidden = self._receive(len(ids), self._stage_to_rank[stage - 1])
            state = ForwardState(cache=cache, router_replay=self.router_replay)
            output = self.stages[stage](row, positions, hidden_states=hidden, state=state, head=head)
            if stage == self.num_stages - 1:
                logits = output[0]
            elif self._stage_to_rank[stage + 1] != rank:
                output = output.contiguous()
                sent.append((output, self._p2p.send(output, self._stage_to_rank[stage + 1])))
            else:
                hidden = output
        return logits, sent

    def start_result(self, result: Tensor) -> list[Message]:
        """Start to send ``result`` from the rank with the last stage to all ranks of the pipeline.

        It is valid when the messages are complete.
        """
        this_rank = self._p2p.index
        sender = self._stage_to_rank[-1]
        if this_rank != sender:
            return [self._p2p.receive_into(result, sender)]
        return [(result, self._p2p.send(result, rank)) for rank in range(self.groups.size("pp")) if rank != this_rank]

    def _receive(self, tokens: int, sender: int) -> Tensor:
        shape = (tokens, 1, self.config.model.stream_size)
        dtype = getattr(torch, self.config.residual_dtype)
        hidden, handle = self._p2p.receive(shape, dtype, self.device, sender)
        handle.wait()
        return hidden


def start_generator(
    reader: StateReader,
    trained: RunConfig,
    layout: GenerationLayout,
    world: World,
    *,
    timeout_minutes: float = 10.0,
) -> tuple[Generator, Tokenizer]:
    """Join the ranks and load the model of ``reader``, trained with the configuration ``trained``; close ``reader``.

    ``ConfigError`` if the checkpoint has no tokenizer, or the layout is illegal.
    """
    with reader:
        config = layout.applied(trained)
        tokenizer = tokenizer_of(config.data)
        if tokenizer is None:
            raise ConfigError(
                f"{reader.folder} has no tokenizer, which is required for prompts; train with --tokenizer-type, or add "
                "the tokenizer.json of the Hugging Face model"
            )
        faults = [*parallel_problems(config, world.size), *invariance_problems(config, world.size)]
        if config.parallel.layout_invariant and config.optional("multi_latent_attention"):
            faults.append(
                "layout_invariant=True cannot be used to generate with multi_latent_attention=True: cached latents are "
                "attended to in another order than in training; remove --layout-invariant"
            )
        if faults:
            raise ConfigError("\n".join(faults))
        start_world(world, timeout_minutes=timeout_minutes)
        groups = make_groups(config.parallel, world)
        if config.parallel.layout_invariant:
            check_same_kernels(config, world.device)
        generator = Generator.load(reader, config, groups, world.device)
        # As in transformers; token files of a training do not have them.
        if reader.only_weights:
            generator.ids_before_prompt = getattr(tokenizer, "ids_before_prompt", ())
        return generator, tokenizer
