"""DeepSeek sparse attention: latent attention to the keys that an indexer selects for each query."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.config.attention import QUERY_BLOCK
from megatron_core.features.latent_attention.attention import LatentAttention
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.features.sparse_attention.settings import INDEXER_LOSS, SparseAttentionConfig
from megatron_core.ops import attention_softmax
from megatron_core.ops.rotary import rope
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import gather_from_sequence, reduce_from_region, reduce_scatter_to_sequence
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import zigzag
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.down_projection import DownProjection
from megatron_core.transformer.norm import Norm
from megatron_core.transformer.recompute import recomputed


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """I_st = 1 / sqrt(H d) sum over heads h of w_sh relu(q_sh k_t), at least in float32.

    Queries ``[s, b, H, d]``, keys ``[t, b, d]``, weights of the heads ``[s, b, H]`` -> ``[b, s, t]``. DeepSeek's code
    has the factor, which the paper's equation 1 leaves to the weights.
    """
    dtype = wide(query.dtype)
    factor = (query.shape[2] * query.shape[3]) ** -0.5
    products = torch.einsum("sbhd,tbd->bsht", query.to(dtype), key.to(dtype)).relu()
    return torch.einsum("bsht,sbh->bst", products, weights.to(dtype)) * factor


def select_keys(scores: Tensor, hidden: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` largest visible scores of each query, int64 ``[b, s, k]``.

    ``scores`` ``[b, s, t]``; ``hidden`` broadcasts to it, True for a key that the query must not see. k is the smaller
    of ``count`` and t. Of equal scores, such as the zeros of ``relu``, the key at the lower position is selected, so
    that the choice is a function of the scores alone. A query that sees fewer keys than k also gets hidden ones.
    """
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def not_selected(positions: Tensor, keys: int) -> Tensor:
    """``[b, s, keys]``, False at ``positions`` ``[b, s, k]`` and True elsewhere."""
    everything = torch.ones(*positions.shape[:-1], keys, dtype=torch.bool, device=positions.device)
    return everything.scatter_(-1, positions, False)


def index_divergence(target: Tensor, scores: Tensor, hidden: Tensor) -> Tensor:
    """KL(p || softmax(I)) of each query over its visible keys, ``[b, s]`` (equations 3 and 4).

    ``target`` p and ``scores`` I are ``[b, s, t]``; ``hidden`` broadcasts to them. p is 0 for hidden keys.
    """
    log_probs = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.special.xlogy(target, target) - target * log_probs).sum(-1)


@dataclass(frozen=True)
class IndexerOutput:
    """Outputs of an indexer for some tokens."""

    query: Tensor
    """``[n, b, H, d]``."""
    key: Tensor
    """``[n, b, d]``."""
    weights: Tensor
    """``[n, b, H]``, the weights of the heads."""


class Indexer(nn.Module):
    """q = R(W_q c_q), k = R(LayerNorm(W_k x)), w = W_w x, of a detached input x and its query latent c_q.

    R rotates the first ``qk_pos_emb_head_dim`` channels of each head. All weights are replicated over the
    tensor-parallel ranks; with sequence parallelism, a rank computes its part of the sequence. Weights are not trained
    without a loss. Source: DeepSeek-AI 2025, section 2.1; names as in Megatron Core's ``DSAIndexer``, order of channels
    as in DeepSeek's code (whose orthogonal rotation before FP8 changes no product).
    """

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__()
        config = context.config.section(SparseAttentionConfig)
        latent = config.section(LatentAttentionConfig)
        self.heads = config.dsa_indexer_n_heads
        self.channels = config.dsa_indexer_head_dim
        self.linear_wq_b = DownProjection(
            context, self.heads * self.channels, inputs=latent.q_lora_rank or config.hidden_size
        )
        self.linear_wk = DownProjection(context, self.channels)
        plain = replace(config, normalization="LayerNorm", apply_layernorm_1p=False, disable_bias_layernorm=False)
        layer_norm = replace(context, config=plain)
        epsilon = config.dsa_indexer_k_norm_epsilon
        self.k_norm = Norm(layer_norm, self.channels, partial_grad=context.sequence_parallel, epsilon=epsilon)
        self.linear_weights_proj = DownProjection(context, self.heads)
        self.turned = latent.qk_pos_emb_head_dim
        self.interleaved = config.dsa_indexer_rope_interleaved
        self.split = context.split
        self.backend = config.kernel_backend
        self.has_rotary = config.has_rotary(layer_number)
        if not config.trains_indexers:
            self.requires_grad_(False)

    def forward(self, hidden: Tensor, query_latent: Tensor, context: SequenceContext) -> IndexerOutput:
        """Of the tokens of ``hidden`` ``[n, b, h]`` and ``query_latent`` ``[n, b, r]``."""
        hidden = hidden.detach()
        query_latent = query_latent.detach()
        query = self._rotated(self.linear_wq_b(query_latent).unflatten(-1, (self.heads, self.channels)), context)
        key = self._rotated(self.k_norm(self.linear_wk(hidden)).unsqueeze(2), context).squeeze(2)
        return IndexerOutput(query, key, self.linear_weights_proj(hidden))

    def _rotated(self, x: Tensor, context: SequenceContext) -> Tensor:
        if not self.has_rotary:
            return x
        assert context.rotary is not None, "the model computes the rotary table"
        cos, sin = (self.split.residual(table) for table in context.rotary)
        turned, plain = x.split([self.turned, self.channels - self.turned], dim=-1)
        turned = rope(turned, cos=cos, sin=sin, interleaved=self.interleaved, backend=self.backend)
        return torch.cat([turned, plain], dim=-1)


class SparseAttention(nn.Module):
    """Attention of queries ``[n, b, heads, d]`` to the ``dsa_indexer_topk`` visible keys with the largest index scores.

    Keys and values of all context-parallel ranks are gathered, so that each query chooses among all keys of its
    document. The ranks of tensor parallelism have the same choice: with sequence parallelism each computes that of its
    part of the queries. In training, the loss of the indexer is attached to the output: the divergence of softmax(I)
    from the attention weights, averaged over heads, which have no gradient. All of it is computed for blocks of
    queries.
    """

    def __init__(self, context: LayerContext, layer_number: int, **_: Any) -> None:
        super().__init__()
        config = context.config.section(SparseAttentionConfig)
        self.layer_number = layer_number
        self.split = context.split
        self.indexer = Indexer(context, layer_number)
        self.topk = sys.maxsize if config.dsa_indexer_warmup else config.dsa_indexer_topk
        self.unfused = config.attention_backend == "unfused"
        self.coefficient = config.dsa_indexer_loss_coeff
        self.sparse_loss = config.dsa_indexer_use_sparse_loss
        self.num_heads = config.num_attention_heads
        self.backend = config.kernel_backend
        self.tp_group = context.tp_group
        self.cp_group = context.cp.whole
        self.sequence_parallel = context.sequence_parallel

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, hidden: Tensor, query_latent: Tensor
    ) -> Tensor:
        """Return ``[n, b, heads * v]``; ``hidden`` and ``query_latent`` are the inputs of the indexer."""
        index = self.indexer(hidden, query_latent, context)
        index_keys = gather_from_sequence(index.key, self.tp_group) if self.sequence_parallel else index.key
        index = replace(index, key=_in_order(index_keys, self.cp_group))
        key = _in_order(key, self.cp_group)
        value = _in_order(value, self.cp_group)
        positions = context.positions
        if positions is None:
            positions = torch.arange(len(query), device=query.device)
        selected = self._select(index, positions, context) if self.topk < len(key) else None

        def attend_block(rows: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            hidden = _hidden(positions[rows], len(keys), context)
            if selected is not None:
                hidden = hidden | not_selected(selected[:, rows], len(keys))
            return self.attend(queries, keys, values, hidden)

        # Backward computes each block again, whose mask and weights have as many elements as it has pairs of tokens.
        blocks = torch.arange(len(query), device=query.device).split(QUERY_BLOCK)
        out = torch.cat([recomputed(attend_block)(rows, query[rows], key, value) for rows in blocks])
        if self.training and self.coefficient and torch.is_grad_enabled():
            chosen = selected if self.sparse_loss else None
            loss = self._loss(index, query.detach(), key.detach(), chosen, positions, context)
            out = context.add_auxiliary_loss(
                out,
                INDEXER_LOSS,
                loss,
                layer_number=self.layer_number,
                coefficient=self.coefficient,
                partial=self.sequence_parallel,
            )
        return out

    @torch.no_grad()
    def _select(self, index: IndexerOutput, positions: Tensor, context: SequenceContext) -> Tensor:
        """Positions of the selected keys of all local queries, int64 ``[b, n, k]``."""
        local_positions = self.split.residual(positions)
        chosen = []
        for rows in torch.arange(len(local_positions), device=local_positions.device).split(QUERY_BLOCK):
            scores = index_scores(index.query[rows], index.key, index.weights[rows])
            chosen.append(select_keys(scores, _hidden(local_positions[rows], len(index.key), context), self.topk))
        selected = torch.cat(chosen, dim=1)
        if self.sequence_parallel:
            selected = gather_from_sequence(selected.transpose(0, 1).contiguous(), self.tp_group).transpose(0, 1)
        return selected

    def attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """Attention to the keys that are not ``hidden`` ``[b, n, t]``."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.unfused:
            scores = query.matmul(key.transpose(-1, -2))
            weights = attention_softmax(scores, hidden[:, None], scale=query.shape[-1] ** -0.5, backend=self.backend)
            out = weights.matmul(value)
        else:
            out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=~hidden[:, None])
        return out.permute(2, 0, 1, 3).flatten(2)

    def _loss(
        self,
        index: IndexerOutput,
        query: Tensor,
        key: Tensor,
        selected: Tensor | None,
        positions: Tensor,
        context: SequenceContext,
    ) -> Tensor:
        """The sum of the divergences, over the ``selected`` or all keys, of this rank's queries whose tokens count."""
        splits = self.tp_group.size() if self.sequence_parallel else 1
        # Rows are numbered within the part of a rank; a block has the same rows of all parts.
        query = query.unflatten(0, (splits, -1))
        positions = positions.unflatten(0, (splits, -1))
        selected = None if selected is None else selected.unflatten(1, (splits, -1))
        tp_rank = self.split.tp_rank if splits > 1 else 0
        total = torch.zeros((), dtype=wide(query.dtype), device=query.device)

        def divergence(rows: Tensor, queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
            hidden = _hidden(positions[:, rows].flatten(), len(key), context)
            if selected is not None:
                hidden = hidden | not_selected(selected[:, :, rows].flatten(1, 2), len(key))
            target = self._target(query[:, rows].flatten(0, 1), key, hidden)
            hidden = hidden.expand(len(hidden), splits * len(rows), -1).unflatten(1, (splits, -1))[:, tp_rank]
            return index_divergence(target, index_scores(queries, keys, weights), hidden)

        for rows in torch.arange(positions.shape[1], device=query.device).split(QUERY_BLOCK):
            # Backward computes the products of all heads again, which are H times as large as the scores.
            divergences = recomputed(divergence)(rows, index.query[rows], index.key, index.weights[rows])
            counted = 1.0 if context.token_mask is None else context.token_mask[rows].transpose(0, 1)
            total = total + (divergences * counted).sum()
        return total

    @torch.no_grad()
    def _target(self, query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
        """The mean of all heads' attention weights ``[b, s, t]``; with sequence parallelism for this rank's queries."""
        query, key = (x.permute(1, 2, 0, 3).to(wide(x.dtype)) for x in (query, key))
        scores = query.matmul(key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        of_heads = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1).sum(1)
        if self.sequence_parallel:
            summed = reduce_scatter_to_sequence(of_heads.transpose(0, 1).contiguous(), self.tp_group).transpose(0, 1)
        else:
            summed = reduce_from_region(of_heads, self.tp_group)
        return summed / self.num_heads


class SparseLatentAttention(LatentAttention):
    """Latent attention whose core is ``SparseAttention``; in generation the cache also stores the index keys.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1.
    """

    core_attention: SparseAttention

    def __init__(self, context: LayerContext, layer_number: int, **options: Any) -> None:
        super().__init__(context, layer_number, **options | {"core_attention": SparseAttention})

    @staticmethod
    def auxiliary_loss_names(config: ModelConfig) -> tuple[str, ...]:
        """The names of the layer's auxiliary losses."""
        return (INDEXER_LOSS,) * config.section(SparseAttentionConfig).trains_indexers

    def _core_inputs(self, hidden: Tensor, query_latent: Tensor) -> tuple[Tensor, ...]:
        return hidden, query_latent

    def attend_in_generation(
        self, cache: Any, query: Tensor, latents: Tensor, context: SequenceContext, *inputs: Tensor
    ) -> Tensor:
        """Store latents and index keys of a step's tokens; return their attention ``[tokens, 1, heads * v]``."""
        index = self.core_attention.indexer(*inputs, context)
        step = cache.step
        memory, keys = cache.write(self.layer_number, latents, index.key)
        index = IndexerOutput(index.query[:, 0], index.key[:, 0], index.weights[:, 0])
        outputs = []
        if step.lengths.numel():
            outputs.append(self._single_tokens(query[: len(step.lengths), 0], index, memory, keys, step))
        for chunk in step.chunks:
            old, old_keys = (step.gathered(stored, chunk.table, chunk.length)[:, 0] for stored in (memory, keys))
            outputs.append(self._chunk(query, index, old, old_keys, chunk.row, chunk.count))
        row = step.cached
        for count in step.fresh:
            rows = slice(row, row + count)
            outputs.append(self._chunk(query, index, latents[rows, 0], index.key[rows], row, count))
            row += count
        return torch.cat(outputs)[:, None]

    def _single_tokens(self, query: Tensor, index: IndexerOutput, latents: Tensor, keys: Tensor, step: Any) -> Tensor:
        """Attention of one token of each of several texts, ``[texts, heads, d]``; only selected latents are read."""
        core = self.core_attention
        count = len(query)
        size = latents.shape[1]
        stored = step.gathered(keys, step.tables, step.longest)[:, :, 0].transpose(0, 1)
        scores = index_scores(index.query[None, :count], stored, index.weights[None, :count])
        hidden = torch.arange(step.longest, device=query.device) >= step.lengths[:, None, None]
        chosen = select_keys(scores, hidden, core.topk)
        hidden = hidden.expand_as(scores).gather(-1, chosen)
        chosen = chosen[:, 0]
        slots = step.tables.gather(1, chosen // size) * size + chosen % size
        memory = latents.flatten(0, 1)[slots, 0]
        query, up_value = self.of_latents(query)
        products = torch.einsum("sac,skc->sak", query, memory) * (self.plain + self.turned) ** -0.5
        weights = products.masked_fill(hidden, -torch.inf).to(wide(query.dtype)).softmax(-1).to(query.dtype)
        out = torch.einsum("sak,skc->sac", weights, memory[..., : self.rank])
        return torch.einsum("sac,avc->sav", out, up_value).flatten(1)

    def _chunk(
        self, query: Tensor, index: IndexerOutput, latents: Tensor, keys: Tensor, row: int, count: int
    ) -> Tensor:
        """Attention of the last ``count`` tokens of a text, which begin at ``row`` of the step.

        ``latents`` ``[t, rank + r]`` and ``keys`` ``[t, d]`` are those of the whole text.
        """
        core = self.core_attention
        outputs = []
        key, value = self.key_and_value(*latents[:, None].split([self.rank, self.turned], dim=-1))
        positions = torch.arange(len(keys) - count, len(keys), device=query.device)
        for query_positions, rows in zip(
            positions.split(QUERY_BLOCK),
            torch.arange(row, row + count, device=query.device).split(QUERY_BLOCK),
            strict=True,
        ):
            scores = index_scores(index.query[rows, None], keys[:, None], index.weights[rows, None])
            hidden = _hidden(query_positions, len(keys), SequenceContext())
            hidden = hidden | not_selected(select_keys(scores, hidden, core.topk), len(keys))
            outputs.append(core.attend(query[rows], key, value, hidden)[:, 0])
        return torch.cat(outputs)


def _hidden(positions: Tensor, keys: int, context: SequenceContext) -> Tensor:
    """``[b or 1, n, keys]``, True for keys that queries at ``positions`` ``[n]`` must not see.

    These are keys after the query, and those of other documents; a mask of ``context`` replaces the causal mask.
    """
    if context.attention_mask is None:
        key_positions = torch.arange(keys, device=positions.device)
        hidden = (key_positions > positions[:, None])[None]
    else:
        hidden = context.attention_mask[:, 0, positions]
    if context.documents is not None:
        key_positions = torch.arange(keys, device=positions.device)
        first = positions - context.documents.ages[:, positions]
        hidden = hidden | (key_positions < first[..., None]) | (key_positions > positions[:, None])
    return hidden


def _in_order(x: Tensor, group: Group) -> Tensor:
    """Gather the tokens ``[n, ...]`` of all context-parallel ranks in the order of their positions."""
    size = group.size()
    if size == 1:
        return x
    length = len(x) * size
    places = torch.cat([torch.arange(*run) for rank in range(size) for run in zigzag(length, rank, size)])
    return gather_from_sequence(x, group)[places.argsort().to(x.device)]
