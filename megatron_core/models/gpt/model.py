"""The GPT model, whole or as a pipeline stage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.config.attention import attention_of
from megatron_core.feature import layer_hooks, load_hook
from megatron_core.models.gpt.embedding import LanguageModelEmbedding
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import gather_channels
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import WHOLE_SEQUENCES, Group, ParallelGroups
from megatron_core.parallel.initialization import initialise_by_name
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.parallel.sharding import amend_spec, spec_of, split
from megatron_core.tensor_parallel import ColumnParallelLinear, ModelParallelConfig, vocab_parallel_cross_entropy
from megatron_core.transformer import SequenceContext, TransformerBlock, layer_spec
from megatron_core.transformer.context import AttentionStep, ForwardState, LayerContext, PackedDocuments, cut_documents
from megatron_core.transformer.layer_spec import LayerSpecs
from megatron_core.transformer.rotary import plain_frequencies, rotary_frequencies, rotary_table

EMBEDDING = "embedding.word_embeddings.weight"
TIED_COPIES = ("output_layer.weight", "mtp.word_embeddings")
LogitLoss = Callable[[Tensor, Tensor], Tensor]
"""Losses ``[s, b]`` of this rank's columns of the logits ``[s, b, v/tp]`` and of labels ``[s, b]``."""


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """The computation of the last stage after its layers."""

    logit_positions: Tensor | None = None
    """``[b, k]``, indices into the tokens of the logits ``[b, k, vocabulary]`` to compute; None: all."""
    logit_loss: LogitLoss | None = None
    """Computes the losses from this rank's columns of the logits, instead of cross entropy."""
    is_skipped: bool = False
    """Return the input of the output layer."""
    only_output_layer: bool = False
    """``hidden_states`` is such an input: compute only this rank's logits ``[s, b, v/tp]``."""


def make_head(context: LayerContext, vocab_size: int, *, tied: bool) -> Any:
    """Construct the head that ``ModelConfig.head_name`` names; features have others than ``VocabularyHead``.

    ``tied``: the embedding on this rank has the weight of a head that shares it.
    """
    name = context.config.head_name
    constructor = VocabularyHead if name == VocabularyHead.name else load_hook(layer_hooks()[name])
    return constructor(context, vocab_size, tied=tied)


class VocabularyHead(ColumnParallelLinear):
    """The output layer of a language model; its rows, the vocabulary, are split over tensor-parallel ranks.

    ``weight``, an argument of the methods, is that of the embedding if the head has none of its own.
    """

    name = "vocabulary"

    def __init__(self, context: LayerContext, vocab_size: int, *, tied: bool) -> None:
        config = context.config
        size = context.tp_group.size()
        super().__init__(
            config.hidden_size,
            context.vocabulary_per_rank(vocab_size) * size,
            config=context.parallel,
            init_method=context.embedding_init_method if config.draws_head_as_embedding else context.init_method,
            bias=config.add_output_layer_bias,
            skip_weight_param_allocation=tied,
            tp_group=context.tp_group,
            spec=lambda shape, index, size: split((vocab_size, *shape[1:]), 0, index, size, padded=shape[0]),
        )
        self.model_config = config
        self.vocab_size = vocab_size
        self.is_tied = tied
        """Whether the weight is that of an embedding on this rank."""

    def logits(self, hidden: Tensor, weight: nn.Parameter | None) -> Tensor:
        """Input of the head ``[s, b, h]`` -> this rank's columns of the logits, ``[s, b, v/tp]``."""
        return self._capped(self(self._scaled(hidden), weight=weight)[0])

    def losses(
        self,
        hidden: Tensor,
        target: Tensor,
        weight: nn.Parameter | None,
        logit_loss: LogitLoss | None = None,
        context: SequenceContext | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Input of the head ``[s, b, h]``, targets ``[s, b]`` -> losses ``[s, b]``; ``logit_loss`` replaces cross
        entropy. With ``context`` and ``loss_mask`` ``[b, s]`` a head may attach auxiliary losses to the model's own."""
        logits = self.logits(hidden, weight)
        if logit_loss is not None:
            return logit_loss(logits, target)
        return vocab_parallel_cross_entropy(logits, target, overwrite_logits=True, **self.vocabulary)

    @property
    def vocabulary(self) -> dict[str, Any]:
        """The arguments of a loss of the logits that describe the vocabulary and its split."""
        group = self.tp_group
        split_over = {"tp_group": group, "num_parts": self.config.arithmetic.parts_on(group)}
        return {**split_over, "vocab_size": self.vocab_size, "backend": self.model_config.kernel_backend}

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Scale the input of the output layer by ``ModelConfig.logit_factor``."""
        factor = self.model_config.logit_factor
        return hidden if factor == 1.0 else hidden * factor

    def _capped(self, logits: Tensor) -> Tensor:
        """c tanh(logits / c) for ``final_logit_softcapping`` c (Gemma 2, arXiv 2408.00118, section 2)."""
        cap = self.model_config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


class GPTModel(nn.Module):
    """A decoder-only language model, or the stage of it with the given ``layers``.

    ``pre_process`` adds the embedding before the layers, ``post_process`` the final norm and the output layer after
    them. ``tied_weight`` is the weight of the word embedding, for a last stage on the same rank as the first.
    ``layer_specs(config, layer_number)`` chooses the parts of each layer. ``groups`` defaults to the current layout;
    ``tp_group`` alone suffices without experts. With ``context_parallel`` each rank of its axis receives a part of
    every sequence (``SequenceSplit.local``).
    Source: Radford et al. 2019; Narayanan et al. 2021 for the split over stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        max_sequence_length: int,
        *,
        parallel: ModelParallelConfig | None = None,
        layers: Sequence[int] | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        tp_group: Group | None = None,
        groups: ParallelGroups | None = None,
        context_parallel: bool = True,
        seed: int = 1234,
        tied_weight: nn.Parameter | None = None,
        layer_specs: LayerSpecs = layer_spec,
    ) -> None:
        super().__init__()
        self.config = self.model_config = config
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.rotary_channels = attention_of(config).rotary_channels
        self._frequencies: dict[tuple[torch.device, int], tuple[Tensor, float]] = {}

        # Settings and groups.
        parallel = parallel or ModelParallelConfig()
        # Weights are initialized below by ``seed`` and global name, so that they are equal under every layout; layers
        # need not initialize their own.
        self.parallel = replace(parallel, perform_initialization=False)
        if groups is None:
            groups = current() if tp_group is None else ParallelGroups.single()
        self.tp_group = groups.group("tp") if tp_group is None else tp_group
        cp = groups.context if context_parallel else WHOLE_SEQUENCES
        context = LayerContext(config, self.parallel, self.tp_group, seed, groups, cp)
        self.split = context.split

        # The parts of the stage.
        self.embedding = LanguageModelEmbedding(context, vocab_size, max_sequence_length) if pre_process else None
        # In a tuple, because a module registers every parameter that is assigned to it.
        self._weights_of_others = () if tied_weight is None else (tied_weight,)
        layers = range(config.num_layers) if layers is None else layers
        self.decoder = TransformerBlock(context, layers, final_norm=post_process, layer_specs=layer_specs)
        self.output_layer: Any = None
        if post_process:
            # Tied to an embedding on the same rank, the output layer has no weight of its own.
            has_embedding = self.embedding is not None or self._weights_of_others != ()
            tied = config.share_embeddings_and_output_weights and has_embedding
            self.output_layer = make_head(context, vocab_size, tied=tied)
        self.mtp: Any = None
        if config.added_layers and post_process:
            # Without a weight on this rank, multi-token prediction has a copy of the embedding, whose gradients are
            # summed with the original's.
            elsewhere = not (pre_process or self._weights_of_others or config.share_embeddings_and_output_weights)
            self.mtp = load_hook(layer_hooks()["multi_token"])(
                context, vocab_size, layer_specs, own_embedding=elsewhere
            )

        # Tied weights, and initialization.
        self._mark_embedding_and_output()
        if config.last_stage_embeds and pre_process != post_process and tied_weight is None:
            shared = self._shared_weight()
            assert shared is not None, "a first or last stage has the weight"
            # Both ends of the pipeline hold the weight, so its gradient is a sum over them; only the first stage's copy
            # is counted and saved.
            amend_spec(shared, tied=groups.ends, is_copy=post_process)
        if parallel.perform_initialization:
            self.initialise(seed)

    def _mark_embedding_and_output(self) -> None:
        """Set the attribute that ``--decoupled-lr`` and optimizers of hidden matrices read; its name is Megatron's."""
        if self.embedding is not None:
            for name, parameter in self.embedding.named_parameters():
                is_matrix = self.model_config.positions_as_matrices and name.startswith("position_embeddings")
                parameter.is_embedding_or_output_parameter = not is_matrix
        if self.output_layer is not None:
            for parameter in self.output_layer.parameters():
                parameter.is_embedding_or_output_parameter = True
        if self.mtp is not None and self.mtp.word_embeddings is not None:
            self.mtp.word_embeddings.is_embedding_or_output_parameter = True

    def _shared_weight(self) -> nn.Parameter | None:
        """The weight of the word embedding, which a tied output layer shares."""
        if self.embedding is not None:
            return self.embedding.word_embeddings.weight
        if self._weights_of_others:
            return self._weights_of_others[0]
        if self.mtp is not None and self.mtp.word_embeddings is not None:
            return self.mtp.word_embeddings
        return self.output_layer.weight if self.output_layer is not None else None

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with names that do not depend on the stage; a copy of a tied weight has the original's name."""
        for name, parameter in super().named_parameters():  # a subclass may rename them
            yield (EMBEDDING if name in TIED_COPIES and spec_of(parameter).is_copy else name), parameter

    def units(self) -> list[list[nn.Module]]:
        """Units of data parallelism, gathered, freed and reduced together: the embedding, each layer, the head.

        A head that uses the embedding's weight lists it, too: the weight belongs to the first unit.
        """
        head: list[nn.Module | None] = [self.decoder.final_layernorm, self.mtp, self.output_layer]
        embeds = self.output_layer is not None and (self.output_layer.is_tied or self.mtp is not None)
        if embeds and (self.embedding is not None or self._weights_of_others):
            # ZeRO-3 must gather the weight for the head, too, although it belongs to the first unit.
            head.append(nn.ParameterList([self._shared_weight()]))
        units = [[self.embedding], *([layer] for layer in self.decoder.layers.values()), head]
        return [present for unit in units if (present := [module for module in unit if module is not None])]

    def initialise(self, seed: int) -> None:
        """Initialize all weights from the seed and their global names."""
        for name, parameter in self.named_global_parameters():
            initialise_by_name(parameter, parameter.init_method, seed, name)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        sequences: SequenceDetails | None = None,
        state: ForwardState | None = None,
        head: HeadOptions | None = None,
    ) -> Tensor:
        """Losses ``[b, s]`` with ``labels``, else logits ``[b, s, vocabulary]``; ``[s, b, h]`` before the last stage.

        Args:
            input_ids, labels: ``[b, s]``; with a cache the texts ``[1, s]``, in the order of ``cache.step``.
            position_ids: ``[b, s]``, or ``[1, s]`` for all sequences; by default ``sequences.positions``.
            hidden_states: output of the previous stage.
            sequences: positions, documents, numbers and masks of the sequences, such as a ``MicroBatch``.
        """
        sequences = sequences or SequenceDetails()
        head = head or HeadOptions()
        if head.only_output_layer:
            assert hidden_states is not None, "the input of the output layer"
            return self.output_layer.logits(hidden_states, self._output_weight())
        # Positions, and the context that all layers share.
        positions = sequences.positions
        loss_mask = sequences.loss_mask
        shape = len(input_ids), input_ids.shape[1] * (sequences.sharing_ranks or self.split.cp_size)
        if positions is None:
            positions = self.split.positions(shape[1], input_ids.device)
        position_ids = positions[None] if position_ids is None else position_ids
        documents = None
        if sequences.document_lengths is not None:
            documents = PackedDocuments.of(sequences.document_lengths, *shape, input_ids.device)
        size = self.model_config.attention_chunk_size
        masked = attention_mask is not None
        context = SequenceContext(
            rotary=self._rotary(position_ids),
            rotary_of_windows=self._rotary_of_windows(position_ids),
            attention_mask=attention_mask,
            documents=documents,
            chunks=cut_documents(documents, size, *shape, input_ids.device, masked=masked),
            for_steps=self._for_steps(position_ids),
            sample_index=sequences.sample_index,
            positions=positions,
            residual_positions=self.split.residual(positions),
            token_mask=None if loss_mask is None else self.split.residual(loss_mask.transpose(0, 1)),
            sharing_ranks=sequences.sharing_ranks,
            **vars(state or ForwardState()),
        )

        # Embedding and layers.
        if self.embedding is not None:
            hidden_states = self.embedding(input_ids, self.split.residual(position_ids, dim=1), context)
        hidden_states = self.decoder(hidden_states, context)
        if self.output_layer is None or head.is_skipped:
            return hidden_states
        tied = self._output_weight()
        if labels is not None:
            losses = self._all_losses(hidden_states, labels, tied, context, sequences, head.logit_loss)
            return losses.transpose(0, 1)
        if head.logit_positions is not None:
            rows = torch.arange(len(head.logit_positions), device=input_ids.device)
            hidden_states = hidden_states[head.logit_positions.t(), rows]
        return self._logits(self.output_layer.logits(hidden_states, tied)).transpose(0, 1)

    def _all_losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        tied: nn.Parameter | None,
        context: SequenceContext,
        sequences: SequenceDetails,
        logit_loss: LogitLoss | None,
    ) -> Tensor:
        """Losses ``[s, b]`` with the gradients of auxiliary losses and of multi-token prediction; see ``forward``."""
        target = labels.transpose(0, 1)
        later = sequences.later
        losses: Tensor = self.output_layer.losses(hidden, target, tied, logit_loss, context, sequences.loss_mask)
        if self.mtp is not None and self.training and later is not None:
            losses_of = partial(self.output_layer.losses, weight=tied)
            losses = self.mtp.add_losses(losses, hidden, labels, later, self._shared_weight(), context, losses_of)
        return losses

    def _output_weight(self) -> nn.Parameter | None:
        """The weight of an output layer without a weight of its own; else None."""
        assert self.output_layer is not None, "only the last stage has an output layer"
        return self._shared_weight() if self.output_layer.is_tied else None

    def _logits(self, logits: Tensor) -> Tensor:
        """This rank's columns of the logits -> logits of the whole vocabulary, without padding."""
        return gather_channels(logits, self.tp_group)[..., : self.vocab_size]

    def _rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.rotary_channels:
            return None
        # Frequencies are settings, which no forward changes; their few numbers would take several launches each time.
        key = position_ids.device, self.max_sequence_length
        frequencies, magnitude = self._frequencies.get(key) or rotary_frequencies(
            self.model_config, self.rotary_channels, self.max_sequence_length, position_ids.device
        )
        # Tensors of a mode, such as fake ones, are of no use after it.
        if not (torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling() or frequencies.is_inference()):
            self._frequencies[key] = frequencies, magnitude
        return rotary_table(position_ids, frequencies, wide(self.parallel.params_dtype), magnitude=magnitude)

    def _for_steps(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        config = self.model_config
        steps: list[type[AttentionStep]] = [load_hook(step) for step in config.attention_steps]
        return tuple(step.of_positions(config, position_ids, self.parallel.params_dtype) for step in steps)

    def _rotary_of_windows(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        base = self.model_config.rotary_base_of_windows
        if not self.rotary_channels or base is None:
            return None
        frequencies = plain_frequencies(self.rotary_channels, base, position_ids.device)
        return rotary_table(position_ids, frequencies, wide(self.parallel.params_dtype))
