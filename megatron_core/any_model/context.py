"""Context parallelism of any model: each rank runs the model on its part of every sequence of the batch."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megatron_core.any_model.context_attention import (
    SequenceGroups,
    SplitForward,
    configs_of,
    decoder_parts,
    keep_attention_out_of_graphs,
    register_with_transformers,
)
from megatron_core.any_model.router_loss import split_balancing_loss
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.compilation.settings import CompilationConfig
from megatron_core.features.context_parallelism.exchange import HeadExchange, exchanges_of
from megatron_core.parallel.collectives import all_reduce_, reduce_from_region
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.parallel.texts import listed

IGNORED = -100
"""The label that torch's cross entropy ignores."""
CACHES = ("past_key_values", "cache")
"""Arguments with keys and values of earlier tokens."""
LAYER_KINDS = ("full_attention", "sliding_attention")
"""Values of ``layer_types`` of a transformers configuration that are attention over tokens."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ContextParallel:
    """Splits the arguments of a model over the context-parallel ranks, which all get the same whole batch.

    A sequence is cut into 2 cp chunks, and rank r has the chunks r and 2 cp - 1 - r (``parallel.micro_batch.zigzag``).
    """

    def __init__(self, model: nn.Module, config: RunConfig, groups: ParallelGroups) -> None:
        """Errors: ``ConfigError`` for models with known mixing of tokens outside of attention."""
        self.model = model
        self.size = groups.size("cp")
        self.split_of = SequenceSplit.of(groups, sequence_parallel=False)
        context = groups.context
        exchange, heads = exchanges_of(config.value("cp_comm_type")[0], context)
        self.groups = SequenceGroups(context.whole, exchange, None if heads is None else HeadExchange(heads))
        self.configs = configs_of(model)
        if config.section(CompilationConfig).compile:
            keep_attention_out_of_graphs()
        if self.configs:
            register_with_transformers()
        self._refuse_mixing()
        self.has_equal_losses = False
        """Whether the losses of the ranks have been compared."""
        self.is_proven = False
        """Whether the model computes on parts of sequences what it computes on whole ones."""

    def _refuse_mixing(self) -> None:
        """ConfigError for layers that mix tokens outside of attention; others are found by the first forward."""
        mixers = (nn.Conv1d, nn.ConvTranspose1d, nn.RNNBase, nn.MultiheadAttention)
        mixing = [f"{path} ({type(m).__name__})" for path, m in self.model.named_modules() if isinstance(m, mixers)]
        kinds = {layer for config in self.configs for layer in getattr(config, "layer_types", None) or ()}
        mixing += [f"layer_types {layer!r}" for layer in sorted(kinds - set(LAYER_KINDS))]
        if mixing:
            raise ConfigError(
                f"context_parallel_size={self.size}: {type(self.model).__name__} mixes tokens outside of "
                f"scaled dot-product attention, in {listed(mixing)}, and no rank has the tokens of other ranks there; "
                "set context_parallel_size=1"
            )
        if not decoder_parts(self.model).issuperset(self.model.modules()):
            raise ConfigError(
                f"context_parallel_size={self.size}: {type(self.model).__name__} joins features of images, video or "
                "audio with the tokens of whole sequences, of which a rank has a part; set context_parallel_size=1"
            )
        has_router_loss = any(getattr(config, "output_router_logits", False) for config in self.configs)
        # Also without it in the configuration: a forward may have the argument.
        if not split_balancing_loss(self.model) and has_router_loss:
            raise ConfigError(
                f"output_router_logits=True with context_parallel_size={self.size}: the auxiliary loss of "
                f"{type(self.model).__name__} is not load_balancing_loss_func of transformers' Mixtral; set it to "
                "False in the model's config"
            )

    def local(self, sequences: Tensor) -> Tensor:
        """Return this rank's tokens of ``[b, s, ...]``."""
        return self.split_of.local(sequences)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over the ranks of a sequence; gradients are those of the local parts."""
        return reduce_from_region(value, self.groups.whole)

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Arguments, SplitForward]:
        """Return this rank's part of the arguments of a forward, and the context for the forward.

        Errors: ``LayoutError`` if the length is not a multiple of 2 cp, ``ConfigError`` for other arguments that cannot
        be split.
        """
        (args, named), shape = self.whole_arguments(args, kwargs)
        return self._split(args, named, shape[1])

    def whole_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Arguments, torch.Size]:
        """Return the arguments with positions and shifted labels for whole sequences, and ``[batch, tokens]``."""
        names = [name for name, _ in zip(self._parameters, args, strict=False)]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        reference = named.get("input_ids", named.get("inputs_embeds"))
        if reference is None:
            reference = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1), None)
        if not isinstance(reference, Tensor) or reference.dim() < 2:
            raise ConfigError(
                f"context_parallel_size={self.size}: no argument of {type(self.model).__name__} is a tensor "
                "[batch, tokens, ...], so that no sequence can be split; set context_parallel_size=1"
            )
        length = reference.shape[1]
        cached = [name for name in CACHES if named.get(name) is not None]
        if cached:
            raise ConfigError(f"{cached[0]} with context_parallel_size={self.size}: pass whole sequences without it")
        if isinstance(named.get("logits_to_keep", 0), Tensor) or named.get("logits_to_keep", 0):
            raise ConfigError(f"logits_to_keep with context_parallel_size={self.size} would keep other tokens: omit it")
        added: dict[str, Any] = dict(self.without_cache)
        if "position_ids" in self._parameters and named.get("position_ids") is None:
            added["position_ids"] = torch.arange(length, device=reference.device)[None].expand(len(reference), length)
        if self._shifts_labels and isinstance(named.get("labels"), Tensor) and named.get("shift_labels") is None:
            # Before the split: the last token of a chunk predicts the first token of the next one.
            labels = named["labels"]
            added["shift_labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
        if len(args) > len(names):  # a forward with *args
            return (tuple(args), {**kwargs, **added}), reference.shape[:2]
        return ((), {**named, **added}), reference.shape[:2]

    def _split(self, args: Sequence[Any], named: dict[str, Any], length: int) -> tuple[Arguments, SplitForward]:
        documents = None
        visible = None
        if self.configs:
            visible = self._padding(named, length)
            # As transformers, which takes restarting positions for documents unless there is a mask.
            if named.get("attention_mask") is None:
                documents = _documents_of(named.get("position_ids"))
            named = {name: value for name, value in named.items() if name != "attention_mask"}
        context = SplitForward(self.groups, length, self.configs, documents=documents, visible=visible)

        def part(tensor: Tensor) -> Tensor:
            return self.local(tensor) if tensor.dim() > 1 and tensor.shape[1] == length else tensor

        local_args, local_named = tree_map_only(Tensor, part, (tuple(args), named))
        return (local_args, local_named), context

    def _padding(self, named: Mapping[str, Any], length: int) -> Tensor | None:
        """Return the mask of padding of whole sequences, None without padding."""
        mask = named.get("attention_mask")
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ConfigError(
                f"attention_mask={shape} with context_parallel_size={self.size} must be [batch, {length}], 1 for "
                "tokens and 0 for padding; give position_ids that restart for documents"
            )
        visible = mask.bool()
        return None if bool(visible.all()) else visible

    @cached_property
    def without_cache(self) -> dict[str, bool]:
        """Arguments with which a transformers model keeps no keys and values for later forwards."""
        # With a cache transformers does not separate documents.
        return {"use_cache": False} if self.configs and "use_cache" in self._parameters else {}

    @cached_property
    def _parameters(self) -> list[str]:
        """Names of the parameters of the model's forward."""
        parameters = inspect.signature(self.model.forward).parameters.values()
        return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    @cached_property
    def _shifts_labels(self) -> bool:
        """Whether the model's loss is that of transformers for the next token."""
        library: Any = sys.modules.get("transformers.loss.loss_utils")
        function: Callable[..., Any] | None = getattr(self.model, "loss_function", None) if self.configs else None
        return library is not None and function is library.ForCausalLMLoss

    def check_loss(self, loss: Tensor | None) -> None:
        """ConfigError unless the ranks of each sequence have the same loss, in the first backward."""
        if loss is None:
            raise ConfigError(
                f"loss.backward() with context_parallel_size={self.size} and a loss that is not in the model's output: "
                "call engine.backward(loss), which compares the losses of the ranks"
            )
        if self.has_equal_losses:
            return
        value = loss.detach().double().reshape(())
        extremes = torch.stack([value, -value])
        all_reduce_(extremes, self.groups.whole, maximum=True)
        highest, lowest = float(extremes[0]), -float(extremes[1])
        if highest - lowest > 1e-6 * abs(highest):
            raise ConfigError(
                f"the context-parallel ranks of a sequence have losses from {lowest:.6g} to {highest:.6g}: each has "
                "the loss of its own tokens; let the model compute it by cross_entropy in its forward, or give the sum "
                "engine.context.total(local_sum) and num_terms"
            )
        self.has_equal_losses = True


def _documents_of(positions: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the lengths of the documents in each sequence, None if each is one document.

    A document begins where a position is not that of the token before plus 1.
    """
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() != 2:
        raise ConfigError(
            f"position_ids of shape {list(positions.shape)} with context_parallel_size > 1 must be [batch, tokens]; "
            "set context_parallel_size=1"
        )
    starts = (positions.diff(dim=1) != 1).cpu()
    if not bool(starts.any()):
        return None
    length = positions.shape[1]
    rows = []
    for row in starts:
        bounds = [0, *(row.nonzero().flatten() + 1).tolist(), length]
        rows.append(tuple(stop - start for start, stop in pairwise(bounds)))
    return tuple(rows)
