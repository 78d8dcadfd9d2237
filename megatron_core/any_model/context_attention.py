"""Attention and cross entropy of a model's forward whose sequences are split over context-parallel ranks."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from megatron_core.errors import ConfigError
from megatron_core.features.context_parallelism.attention import SplitSequence
from megatron_core.features.context_parallelism.attention import split_attention as attend
from megatron_core.features.context_parallelism.exchange import Exchange, HeadExchange
from megatron_core.features.context_parallelism.products import Unfused, fused_products
from megatron_core.features.context_parallelism.tiles import Tile
from megatron_core.parallel.collectives import all_reduce_, reduce_from_region
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.parallel.rank_local import RankLocal
from megatron_core.parallel.texts import listed

IMPLEMENTATION = "megatron_core_context_parallel"
"""Name of this attention among those of transformers."""
KNOWN_MASKS = {
    *("causal_mask_function", "bidirectional_mask_function", "and_masks", "sliding_window_overlay"),
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence", "padding_mask_function"),
}
"""Functions of ``transformers.masking_utils`` whose combinations ``MaskRule`` can express."""

_CURRENT: RankLocal["SplitForward | None"] = RankLocal(lambda: None)
"""The forward of this rank that is running."""


@dataclass(frozen=True)
class MaskRule:
    """Visible keys of a layer; the attention functions of transformers receive it in place of a mask tensor."""

    causal: bool = True
    window: int | None = None
    """Number of visible keys of a query: its own and the preceding ones; None: all."""
    packed: bool = False
    """Whether documents are separate."""


@dataclass(frozen=True)
class SequenceGroups:
    """The ranks that share each sequence, and how they exchange keys and values, or heads."""

    whole: Group
    exchange: Exchange
    """Passes keys and values around; with ``heads`` among the ranks that have the same heads."""
    heads: HeadExchange | None = None


class SplitForward(TorchFunctionMode):
    """Context of a forward on this rank's part of each sequence of ``length`` tokens.

    Attention reads the keys of all ranks, and cross entropy is that of all tokens. Backward of a recomputed unit enters
    the context again, because attention needs the documents of the unit's own micro-batch.
    """

    def __init__(
        self,
        groups: SequenceGroups,
        length: int,
        configs: Sequence[Any],
        *,
        documents: tuple[tuple[int, ...], ...] | None = None,
        visible: Tensor | None = None,
    ) -> None:
        """``configs``: those of transformers modules. ``visible``: ``[b, s]``, False for padding, of whole sequences"""
        super().__init__()
        self.groups = groups
        self.length = length
        self.documents = documents
        self.visible = visible
        self.attentions = 0
        """Number of attentions computed so far."""
        self._configs = configs
        self._before: list[Any] = []
        self._enclosing: SplitForward | None = None

    @property
    def local_length(self) -> int:
        """Tokens of a sequence on this rank."""
        return self.length // self.groups.whole.size()

    def __enter__(self) -> "SplitForward":
        # The model has its own attention outside of this context, so that generation and evaluation still work.
        self._before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = IMPLEMENTATION
        self._enclosing = _CURRENT()
        _CURRENT.set(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _CURRENT.set(self._enclosing)
        for config, implementation in zip(self._configs, self._before, strict=True):
            config._attn_implementation_internal = implementation

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace torch's attention and cross entropy; call other functions unchanged."""
        # A mode and not a replaced attribute: it applies to one thread, and to functions imported by name.
        if func is F.scaled_dot_product_attention:
            return self._scaled_dot_product(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise ConfigError(
                "torch.nn.MultiheadAttention cannot be split over context-parallel ranks: it also computes masks and "
                "weights of local tokens; call torch.nn.functional.scaled_dot_product_attention, or set "
                "context_parallel_size=1"
            )
        return func(*args, **(kwargs or {}))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: MaskRule,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query ``[b, heads, n, d]``, key ``[b, groups, n, d]``, value ``[b, groups, n, e]`` ->
        ``[b, heads, n, e]``, over the keys of all ranks."""
        self.attentions += 1
        self._check_shapes(query, key, value)
        root = math.sqrt(query.shape[-1])
        if scaling is not None and not math.isclose(scaling * root, 1.0, rel_tol=1e-12):
            query = query * (scaling * root)  # the products divide scores by the root
        heads = self.groups.heads
        if heads is not None:
            size = heads.group.size()
            sinks = None if sinks is None else sinks.chunk(size)[heads.group.rank()]
            mixed = heads.to_heads(*(x.permute(2, 0, 1, 3) for x in (query, key, value)))
            query, key, value = (x.permute(1, 2, 0, 3) for x in mixed)
        out = attend(query, key, value, self._sequence(query, value, rule, softcap), sinks)
        if heads is None:
            return out
        channels = out.shape[-1]
        return heads.to_sequence(out.permute(2, 0, 1, 3).flatten(2)).unflatten(2, (-1, channels)).permute(1, 2, 0, 3)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        lengths = [x.shape[-2] for x in (query, key, value)]
        if query.dim() != 4 or lengths != [self.local_length] * 3:
            raise ConfigError(
                f"an attention with queries {list(query.shape)} and keys {list(key.shape)} cannot be split over "
                f"context-parallel ranks: both must be [batch, heads, {self.local_length}, channels], this rank's part "
                f"of {self.length} tokens; set context_parallel_size=1"
            )
        size = self.groups.heads.group.size() if self.groups.heads is not None else 1
        if query.shape[1] % size:
            raise ConfigError(
                f"cp_comm_type exchanges the {query.shape[1]} heads of a rank among {size} context-parallel ranks, "
                "which must divide them; use cp_comm_type='p2p' or 'all_gather', or fewer ranks"
            )

    def _sequence(self, query: Tensor, value: Tensor, rule: MaskRule, softcap: float | None) -> SplitSequence:
        group = self.groups.exchange.group
        mask = None if self.visible is None else self._padding
        narrow = value.shape[-1] <= query.shape[-1]
        products = fused_products(query.device, query.dtype, mask)
        if softcap is not None or not narrow:  # fused kernels have neither
            products = Unfused(softcap=softcap, mask=mask)
        length = query.shape[2] * group.size()
        documents = self.documents if rule.packed else None
        return SplitSequence(length, self.groups.exchange, products, documents, rule.window, rule.causal)

    def _padding(self, tile: Tile, owner: int) -> Tensor:
        """``[b, 1, 1, k]``, True for padding among the keys of a tile."""
        assert self.visible is not None
        split = SequenceSplit(cp_rank=owner, cp_size=self.groups.exchange.group.size())
        keys = split.local(self.visible)[tile.rows, slice(*tile.keys)]
        return ~keys[:, None, None]

    def _scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        refuse_mask_and_dropout("scaled_dot_product_attention", attn_mask, dropout_p)
        return self.attention(query, key, value, MaskRule(is_causal), scaling=scale)

    def _cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The sum over all ranks, or the mean over the tokens of all ranks."""
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        if reduction == "none":
            return F.cross_entropy(input, target, weight, reduction="none", **options)  # type: ignore[arg-type]
        if target.is_floating_point() or size_average is not None or reduce is not None:
            raise ConfigError(
                "cross_entropy with probabilities as targets, size_average or reduce cannot be summed over "
                "context-parallel ranks; give class indices and reduction, or set context_parallel_size=1"
            )
        if target.numel() % self.local_length or not target.numel():
            raise ConfigError(
                f"cross_entropy over {target.numel()} targets, but this context-parallel rank has "
                f"{self.local_length} of {self.length} tokens of each sequence; shift labels before the forward, "
                "because the last token of a part predicts the first token of the next one, and return a loss of tokens"
            )
        total = F.cross_entropy(input, target, weight, reduction="sum", **options)  # type: ignore[arg-type]
        total = reduce_from_region(total, self.groups.whole)
        if reduction == "sum":
            return total
        counted = target != ignore_index
        # Each rank has another number of counted tokens, so a mean of means would weight tokens differently.
        terms = counted.sum() if weight is None else weight[target[counted]].sum()
        terms = terms.to(total.dtype)
        all_reduce_(terms, self.groups.whole)
        return total / terms


def running_forward() -> SplitForward | None:
    """Return the context of the running forward, if its sequences are split."""
    return _CURRENT()


def current_forward() -> AbstractContextManager[Any]:
    """Return the context of the running forward, for its recomputation in backward."""
    running = _CURRENT()
    if running is None:
        return nullcontext()
    # A copy, because the state of a context must not change while another forward is inside of it.
    return SplitForward(
        running.groups, running.length, running._configs, documents=running.documents, visible=running.visible
    )


def keep_attention_out_of_graphs() -> None:
    """Let ``torch.compile`` divide graphs at the attention, which exchanges keys and values with other ranks."""
    forward_class: Any = SplitForward
    if not hasattr(forward_class.attention, "__wrapped__"):
        # Here and not at the definition: it imports torch._dynamo, which takes 1.5 s.
        forward_class.attention = torch.compiler.disable(forward_class.attention)


def refuse_mask_and_dropout(name: str, mask: Any, dropout: float) -> None:
    """ConfigError for a mask tensor, which has only local tokens, and for dropout of attention weights."""
    if mask is not None:
        raise ConfigError(
            f"{name}: a mask tensor of shape {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__} "
            "has only the tokens of this context-parallel rank; use is_causal=True without a mask, or set "
            "context_parallel_size=1"
        )
    if dropout:
        raise ConfigError(
            f"{name}: dropout={dropout} of attention weights is not supported with context_parallel_size > 1; set the "
            "model's attention dropout to 0"
        )


# Transformers.


def register_with_transformers() -> None:
    """Add this attention and its masks to those of transformers."""
    from transformers import masking_utils
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(_attention_of_transformers))
    AttentionMaskInterface.register(IMPLEMENTATION, _mask_of_transformers)
    # Models call it if they separate documents, which gpt-oss does not; local positions show none, because they jump
    # between two chunks.
    find = masking_utils.find_packed_sequence_indices
    if not hasattr(find, "__wrapped__"):
        masking_utils.find_packed_sequence_indices = wraps(find)(partial(_find_documents, find))


def _find_documents(find: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
    running = _CURRENT()
    if running is None:
        return find(position_ids)
    # Only whether there are documents matters: ``SplitForward`` has those of the whole sequences.
    return position_ids if running.documents is not None else None


def configs_of(model: nn.Module) -> list[Any]:
    """Return the distinct configurations of the transformers modules in ``model``."""
    library: Any = sys.modules.get("transformers.configuration_utils")
    if library is None:
        return []
    attributes = [value for module in model.modules() for value in vars(module).values()]
    configs = {id(value): value for value in attributes if isinstance(value, library.PreTrainedConfig)}
    return list(configs.values())


def decoder_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules in the decoder of a transformers model that also encodes images, video or audio.

    Micro-batches of text alone do not run its other modules. In other models: all modules.
    """
    module: Any
    for module in model.modules():
        find_encoder = getattr(module, "get_encoder", None)
        if find_encoder is None:
            continue
        # The outermost model of transformers. One with a text encoder always runs it.
        if module.can_generate() and not module.config.is_encoder_decoder:
            parts = {*module.get_decoder().modules()}
            if any(parts.isdisjoint(find_encoder(kind).modules()) for kind in ("image", "video", "audio")):
                return parts
        break
    return {*model.modules()}


def disable_cache(model: nn.Module) -> None:
    """Let transformers modules keep no keys and values, which recomputed layers and those of other stages falsify."""
    for config in configs_of(model):
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _attention_of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    running = _CURRENT()
    assert running is not None, "the implementation is set inside of a SplitForward"
    for argument in ("position_bias", "head_mask"):
        if kwargs.get(argument) is not None:
            raise ConfigError(f"{name}: {argument} is not supported with context_parallel_size > 1; set it to 1")
    if kwargs.get("output_attentions"):
        raise ConfigError(
            f"{name}: output_attentions=True, but no rank has the attention weights of whole sequences with "
            "context_parallel_size > 1; set it to False"
        )
    rule = attention_mask
    if not isinstance(rule, MaskRule):
        refuse_mask_and_dropout(name, attention_mask, 0.0)
        rule = MaskRule(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    refuse_mask_and_dropout(name, None, dropout)
    out = running.attention(query, key, value, rule, scaling=scaling, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _mask_of_transformers(
    *, mask_function: Callable[..., Any], local_size: int | None = None, config: Any = None, **kwargs: Any
) -> MaskRule:
    """Return the rule that a mask function of transformers expresses; padding is known from whole sequences."""
    leaves = set(_names_in(mask_function))
    unknown = leaves - KNOWN_MASKS
    if unknown or ("bidirectional_mask_function" in leaves and "sliding_window_overlay" in leaves):
        raise ConfigError(
            f"{type(config).__name__}: the mask of {listed(sorted(unknown or leaves))} cannot be split over "
            "context-parallel ranks; legal: causal masks, sliding windows, documents and bidirectional attention; set "
            "context_parallel_size=1"
        )
    window = local_size if "sliding_window_overlay" in leaves else None
    packed = "packed_sequence_mask_function" in leaves
    return MaskRule("bidirectional_mask_function" not in leaves, window, packed)


def _names_in(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the functions that a mask function is composed of."""
    yield getattr(function, "__qualname__", type(function).__name__).partition(".")[0]
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for inner in content if isinstance(content, tuple) else (content,):
            if callable(inner) and not isinstance(inner, Tensor | type):
                yield from _names_in(inner)
