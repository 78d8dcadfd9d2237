"""QK-clip: limits attention logits by scaling the weights of queries and keys (MuonClip, Kimi K2, arXiv 2507.20534).

After each update, with the largest logit S_h of head h in the global batch and threshold t: g_h = min(1, t / S_h); the
rows of head h of W_q are multiplied by g_h^a and those of W_k by g_h^(1 - a), so that its logits shrink by g_h. Heads
that share a key head share the smallest g_h. In latent attention the rotary part of the queries, whose keys all heads
share, is multiplied by g_h, and that of the keys is not changed (section 2.1, algorithm 1).
"""

import math
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config.attention import QUERY_BLOCK
from megatron_core.errors import ConfigError
from megatron_core.features.latent_attention.attention import LatentAttention
from megatron_core.features.qk_clip.settings import QKClipConfig, recording_setting
from megatron_core.ops.rows import copied_to
from megatron_core.parallel.collectives import all_reduce_, start_gather_sequence
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.context import PackedDocuments, SequenceContext


class MaxLogits:
    """Records max q k / sqrt(d) over the keys that each query sees, in all micro-batches since ``reset``.

    Fused kernels do not return it, so the scores are computed a second time, for blocks of queries, without gradients.
    ``group``: the ranks that share each sequence. ``window``: keys that a query sees, None for all.
    """

    def __init__(self, heads: int, device: torch.device, group: Group, window: int | None) -> None:
        self.group = group
        self.window = window
        self.largest = torch.full((heads,), -math.inf, dtype=torch.float64, device=device)
        """``[heads]``: of this rank's heads and queries."""

    def reset(self) -> None:
        """Begin a step."""
        self.largest.fill_(-math.inf)

    @torch.no_grad()
    def record(self, query: Tensor, key: Tensor, context: SequenceContext) -> None:
        """Add the logits of queries ``[s, b, heads, d]`` and keys ``[s, b, groups, d]`` of this rank's tokens."""
        positions = context.positions
        if positions is None:
            positions = torch.arange(len(query), device=query.device)
        key, handle = start_gather_sequence(key.detach(), self.group)
        of_keys, other = start_gather_sequence(positions, self.group)
        handle.wait()
        other.wait()
        documents = None if context.documents is None else _numbers(context.documents, len(of_keys))
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2).permute(1, 2, 3, 0)
        for block, of_queries in zip(query.detach().split(QUERY_BLOCK), positions.split(QUERY_BLOCK), strict=True):
            scores = block.permute(1, 2, 0, 3) @ key / math.sqrt(query.shape[-1])
            distance = of_queries[:, None] - of_keys
            hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
            hidden = hidden[None]
            if documents is not None:
                hidden = hidden | (documents[:, of_queries, None] != documents[:, None, of_keys])
            if context.attention_mask is not None:
                hidden = hidden | context.attention_mask[:, 0][:, of_queries][:, :, of_keys]
            largest = scores.masked_fill(hidden[:, None], -math.inf).amax((0, 2, 3))
            self.largest = torch.maximum(self.largest, largest.to(self.largest.dtype))


def _numbers(documents: PackedDocuments, length: int) -> Tensor:
    """The number of the document of each token, ``[b, length]``."""
    numbers = torch.zeros(len(documents.lengths), length, dtype=torch.int64, device=documents.device)
    for row, lengths in zip(numbers, documents.lengths, strict=True):
        row[copied_to(list(accumulate(lengths))[:-1], torch.int64, row.device)] = 1
    return numbers.cumsum(1)


Attention = SelfAttention | LatentAttention
Blocks = tuple[tuple[Tensor, int], ...]
"""The factors of the rows of each group, and the number of these rows, for the parts of a group in their order."""


class QKClip(RunPart):
    """Records the logits of attention layers, and, with ``qk_clip``, clips their weights after each update."""

    def __init__(self, run: Run) -> None:
        config = run.config
        groups = run.groups
        device = run.world.device
        self.model = config.model
        self.settings = config.section(QKClipConfig)
        self.optimizer = run.optimizer
        self.groups = groups
        self.device = device
        self.layers: list[Attention] = []
        self.recorders: list[MaxLogits] = []
        self.largest = -math.inf
        """The largest logit of this rank's stages in the last step."""
        heads = config.model.num_attention_heads // groups.size("tp")
        modules = (module for stage in run.stages.values() for module in stage.modules())
        for layer in modules:
            if not hasattr(layer, "core_attention"):
                continue
            if not isinstance(layer, SelfAttention | LatentAttention):
                name = recording_setting(self.settings)
                raise ConfigError(f"{name}=True does not know the weights of {type(layer).__name__}; remove it")
            window = config.model.window_of_layer(layer.layer_number)
            keys_seen = None if window is None or window[0] < 0 else window[0] + 1
            recorder = MaxLogits(heads, device, groups.group("cp"), keys_seen)
            layer.core_attention.register_forward_pre_hook(partial(_record, recorder))
            self.layers.append(layer)
            self.recorders.append(recorder)
        run.optimizer.after_update.append(self.clip)

    def before_step(self) -> None:
        """Begin a step."""
        for recorder in self.recorders:
            recorder.reset()

    @torch.no_grad()
    def clip(self) -> None:
        """Find the largest logit, and scale the weights of heads above the threshold; a collective call of all ranks of
        the pipeline stage."""
        if not self.layers:
            return
        # The largest logit of each head of the model, over all ranks that compute parts of the batch.
        model = self.model
        heads = self.model.num_attention_heads
        local_heads = heads // self.groups.size("tp")
        first = self.groups.index("tp") * local_heads
        largest = torch.full((len(self.layers), heads), -math.inf, dtype=torch.float64, device=self.device)
        for row, recorder in zip(largest, self.recorders, strict=True):
            row[first : first + local_heads] = recorder.largest
        all_reduce_(largest, self.groups.group("tp-dp-cp"), maximum=True)
        self.largest = largest.max().item()
        if not self.settings.qk_clip:
            return
        # The factors of the rows of each layer with a large logit.
        rows: dict[nn.Parameter, Tensor] = {}
        for layer, row in zip(self.layers, largest, strict=True):
            shared = heads if isinstance(layer, LatentAttention) else model.of_layer(layer.layer_number).query_groups
            groups = row.view(shared, -1).amax(-1)
            factors = (self.settings.qk_clip_threshold / groups).where(groups > self.settings.qk_clip_threshold, 1.0)
            if (factors < 1.0).any():
                rows.update(self._rows(layer, factors))
        self._scale(rows)

    def metrics(self) -> dict[str, float]:
        """The largest attention logit of the model in the last step; a collective call of all ranks."""
        largest = torch.tensor(self.largest, dtype=torch.float64, device=self.device)
        all_reduce_(largest, self.groups.group("pp"), maximum=True)
        return {"max attention logit": largest.item()}

    def _rows(self, layer: Attention, factors: Tensor) -> dict[nn.Parameter, Tensor]:
        """The factor of each row of the global weights of queries and keys, by this rank's parameters."""
        alpha = self.settings.qk_clip_alpha
        model = self.model
        query = factors**alpha
        key = factors ** (1.0 - alpha)
        if isinstance(layer, LatentAttention):
            plain = layer.plain
            turned = layer.turned
            value = layer.value
            up = layer.linear_q_up_proj if layer.has_query_latent else layer.linear_q_proj
            blocks_of: dict[Any, Blocks] = {
                up: ((query, plain), (factors, turned)),
                layer.linear_kv_up_proj: ((key, plain), (torch.ones_like(key), value)),
            }
        else:
            d = layer.head_size
            queries = model.num_attention_heads // len(factors) * layer.head_size
            one = torch.ones_like(key)
            blocks_of = {layer.linear_qkv: ((query, queries), (one, queries * layer.gated), (key, d), (one, d))}
        rows = {}
        for linear, blocks in blocks_of.items():
            repeated = torch.cat([factor[:, None].expand(-1, size) for factor, size in blocks], dim=1).flatten()
            for parameter in (linear.weight, linear.bias):
                if isinstance(parameter, nn.Parameter):
                    rows[parameter] = repeated
        return rows

    def _scale(self, rows: dict[nn.Parameter, Tensor]) -> None:
        """Multiply the rows of global weights, in this rank's shards of main weights, and copy them to the model's."""
        for shard in self.optimizer.shards if rows else ():
            for _, parameter, start, stop, first in shard.bucket.pieces():
                if parameter not in rows:
                    continue
                spec = spec_of(parameter)
                factors = rows[parameter]
                local = factors.new_empty(spec.local_shape)
                spec.localise(factors.view(-1, *[1] * (local.dim() - 1)).expand(spec.global_shape), local)
                span = slice(first, first + stop - start)
                main = shard.main[span]
                weight = shard.bucket.weight_shard[span]
                main.mul_(local.view(-1)[start:stop].to(main))
                if shard.is_narrow:
                    weight.copy_(main)


def _record(recorder: MaxLogits, core_attention: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Record the logits of a training forward; ``inputs``: those of the core attention, which begin with queries, keys,
    values and the context of the sequence."""
    if core_attention.training:
        query, key, _, context, *_ = inputs
        recorder.record(query, key, context)
