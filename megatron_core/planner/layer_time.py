"""Seconds of a layer and of the ends of the model, forward and backward, of one micro-batch on one rank.

The time of an operation is the maximum of its arithmetic and its memory traffic (Williams et al. 2009, the roofline)
plus a launch; the time of a collective follows from the links of its group. Overlapped communication is excluded as far
as there is computation to overlap with. The bytes of an elementwise operation are the minimum of a fused kernel: a norm
reads its input and writes its output; its backward reads input and gradient and writes one gradient.
"""

from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.attention import attention_of
from megatron_core.config.linear_layers import feed_forward_of
from megatron_core.config.mixers import mixer_of
from megatron_core.planner.context import comm_type_of, layer_pairs, layer_traffic
from megatron_core.planner.hardware import Hardware, Rings
from megatron_core.planner.memory import computed_weights, layer_activations, number_size
from megatron_core.planner.parameters import joins_parts, padded_vocabulary
from megatron_core.planner.passes import Passes, Seconds, total
from megatron_core.planner.recurrence import RecurrenceCost
from megatron_core.planner.sparse_attention import sparse_seconds

ATTENTION_EDGE = 250
"""Overhead of fused attention per query, in keys: published rates of causal FlashAttention 2 and 3 and of cuDNN on A100
and H100 are lower by a factor of 1.7 to 2.1 for 512 tokens than for 16,384 (tests/planner/test_published_time.py)."""


class LayerClock:
    """Times of the layers of a configuration on a machine with ``world_size`` ranks."""

    def __init__(self, config: RunConfig, hardware: Hardware, world_size: int, vocab_size: int) -> None:
        self.config = config
        self.hardware = hardware
        self.vocab_size = vocab_size
        parallel = config.parallel
        model = config.model
        self.rings = Rings(hardware, parallel, world_size)
        self.rate = hardware.flops(config.training.compute_dtype)
        self.fast_rate = hardware.product_flops.get("float8", self.rate)  # without float8 products are emulated
        self.eight_bit = False
        self.bytes = number_size(config.training.compute_dtype)
        self.stream_bytes = number_size(config.residual_dtype)
        self.tp, self.cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.tokens = config.data.seq_length * config.training.micro_batch_size / self.cp
        self.parts = self.tp if parallel.sequence_parallel else 1
        self.attention_kind = attention_of(model)
        self.heads = model.num_attention_heads / self.tp
        query, value = self.attention_kind.query_head_size, self.attention_kind.value_head_size
        self.queries, self.outputs = self.heads * query, self.heads * value

    # --- single operations

    def product(self, m: float, k: float, n: float, *, count: float = 1, result_bytes: float | None = None) -> float:
        """Seconds of ``count`` products of ``[m, k]`` and ``[k, n]``."""
        if min(m, k, n) <= 0:
            return 0.0
        edge = self.hardware.product_edge
        flops = 2 * m * k * n * (1 + edge / m) * (1 + edge / k) * (1 + edge / n)
        arithmetic = flops / (self.fast_rate if self.eight_bit else self.rate)
        result = self.bytes if result_bytes is None else result_bytes
        moved = (1 if self.eight_bit else self.bytes) * (m * k + k * n) + result * m * n
        return count * max(arithmetic, moved / self.hardware.memory_bandwidth)

    def elements(self, size: float) -> float:
        """Seconds of an elementwise operation that reads and writes ``size`` bytes."""
        return size / self.hardware.memory_bandwidth

    def launches(self, count: float) -> float:
        """Seconds of ``count`` kernel launches."""
        return count * self.hardware.launch_seconds

    def exposed(self, communication: float, computation: float) -> float:
        """Seconds that overlapped communication adds to a computation: communication minus the overlapped share."""
        return communication - self.hardware.overlap * min(communication, computation)

    # --- a linear layer: forward, and both gradients

    def linear(self, rows: float, inputs: float, outputs: float, count: float = 1) -> tuple[float, float, float]:
        """Seconds of a linear layer's forward, input gradient and weight gradient (accumulated in float32 or wider)."""
        wide = 2 * max(self.bytes, 4)
        of_rows = self.product(rows, inputs, outputs, count=count), self.product(rows, outputs, inputs, count=count)
        dense = (*of_rows, self.product(outputs, rows, inputs, count=count, result_bytes=wide))
        if not self.eight_bit:
            return dense
        forward, backward, weight_grad = self.casts(rows, inputs, outputs)
        return dense[0] + count * forward, dense[1] + count * backward, dense[2] + count * weight_grad

    def casts(self, rows: float, inputs: float, outputs: float) -> tuple[float, float, float]:
        """Seconds of the casts to 8 bits before each product of a linear layer.

        Forward casts input and weight, backward the output's gradient, each for both of its products.
        """
        # The scale of a whole matrix or row needs an additional pass.
        n = self.bytes
        scale = n * (self.config.optional("fp8_recipe") in ("tensorwise", "rowwise"))
        both = self.elements(scale + n + 2)
        return both * (rows * inputs + inputs * outputs), both * rows * outputs, 0.0

    def pair(
        self, rows: float, inputs: float, inner_in: float, inner_out: float, outputs: float, *, joined: bool = False
    ) -> Passes:
        """A column-parallel and a row-parallel linear layer, with their communication.

        Without sequence parallelism: an all-reduce of the output in forward and of the input's gradient in backward.
        With it: an all-gather and a reduce-scatter in forward and in backward, and an all-gather of the input for the
        weight gradient (Korthikanti et al. 2022, section 4.2.2). ``joined``: another pair, with the same input, has the
        reductions of both; only gathers of the input are left.
        """
        first, second = self.linear(rows, inputs, inner_in), self.linear(rows, inner_out, outputs)
        ring = self.rings.ring("tp")
        size = self.bytes * self.tokens * self.config.model.hidden_size
        gather = ring.gather(size)
        passes = [
            {"products": sum(seconds), "launches": self.launches(2)} for seconds in zip(first, second, strict=True)
        ]
        if joined:
            inputs_of_part = gather if self.parts > 1 else 0.0
            backward = self.exposed(inputs_of_part, first[1])
            return Passes(passes[0] | {"tp": inputs_of_part}, passes[1] | {"tp": backward}, passes[2])
        backward = 0.0
        if self.parts > 1:
            backward = gather + self.exposed(gather, first[1])  # gathers of the output's gradient and of the input
            reducing = gather
        else:
            reducing = 2 * gather
        hidden = reducing - self.exposed(reducing, first[2]) if self.config.parallel.tp_comm_overlap else 0.0
        backward += reducing - hidden
        return Passes(passes[0] | {"tp": 2 * gather}, passes[1] | {"tp": backward}, passes[2], hidden)

    # --- parts of a layer

    def core_attention(self, layer: int) -> tuple[Seconds, Seconds]:
        """Forward and backward of scores, softmax and weighted values."""
        # Communication of context parallelism.
        config = self.config
        length = config.data.seq_length
        batch = config.training.micro_batch_size
        sent = layer_traffic(config, layer)
        ring = self.rings.ring("cp")
        comm = [
            sent_bytes / ring.bandwidth + ring.steps * ring.latency if self.cp > 1 else 0.0
            for sent_bytes in (sent.forward, sent.backward)
        ]
        # Arithmetic and memory traffic, with a fused kernel or with separate operations.
        pairs = layer_pairs(config, layer) * batch
        if self._fused:
            flops = 2 * (self.queries + self.outputs) * (pairs + ATTENTION_EDGE * self.tokens)
            forward = flops / (self.rate * self.hardware.attention_efficiency)
            io = self.elements(self.bytes * self.tokens * (self.queries + self.outputs + sum(self.keys_values(layer))))
            times = [max(forward, io), max(2.5 * forward, 2 * io)]
            kinds = [{"attention": times[0]}, {"attention": times[1]}]
            kernels = (1.0, 3.0)
        else:
            count = batch * self.heads
            queries = length / self.cp
            scores = self.product(queries, self.attention_kind.query_head_size, length, count=count)
            values = self.product(queries, length, self.attention_kind.value_head_size, count=count)
            drops = config.model.attention_dropout > 0
            # Blocks of queries leave out the keys after them; tiles of context parallelism do not.
            share = computed_weights(config.model, length) / length**2 if queries == length else 1.0
            products = share * scores + share * values
            size = share * count * queries * length * self.bytes
            kinds = [
                {"attention": products, "elements": self.elements(size * (4 if drops else 2))},
                {"attention": 2 * products, "elements": self.elements(size * (5 if drops else 3))},
            ]
            kernels = (5.0, 8.0)
        if self.cp > 1:  # partial outputs and gradients of queries are accumulated in float32, block by block
            joined = 4 * self.tokens * self.outputs * (self.cp - 1)
            for seconds_by_kind, passes_over in zip(kinds, (3, 2), strict=True):
                seconds_by_kind["elements"] = seconds_by_kind.get("elements", 0.0) + self.elements(passes_over * joined)
        # Exposed communication and launches.
        overlaps = comm_type_of(config, layer) in ("p2p", "a2a+p2p")
        for seconds_by_kind, seconds, launched in zip(kinds, comm, kernels, strict=True):
            if self.cp > 1:
                seconds_by_kind["cp"] = self.exposed(seconds, seconds_by_kind["attention"]) if overlaps else seconds
            seconds_by_kind["launches"] = self.launches(launched * self.cp)
        return kinds[0], kinds[1]

    def keys_values(self, layer: int) -> tuple[int, int]:
        """Channels of all keys and of all values on a rank."""
        attention = attention_of(self.config.model.of_layer(layer))
        groups = attention.key_value_heads(self.tp)
        return groups * attention.query_head_size, groups * attention.value_head_size

    @property
    def _fused(self) -> bool:
        model = self.config.model
        bounded = model.attention_backend == "auto" and model.attn_logit_softcapping is not None
        return model.attention_backend != "unfused" and not bounded and not model.attention_dropout

    def mixing(self, layer: int) -> tuple[Seconds, Seconds]:
        """Forward and backward of core attention, or of a recurrence, which backward computes again."""
        model = self.config.model
        passes = []
        if model.has_attention(layer) and model.attention_name == "sparse_latent":
            passes.append(sparse_seconds(self.config, layer, self.hardware, self.rings))
        elif model.has_attention(layer):
            passes.append(self.core_attention(layer))
        if model.is_recurrent(layer):
            forward = RecurrenceCost.of(self.config, layer).seconds(self.hardware, self.rings.ring("cp"))
            passes.append((forward, {category: 3 * seconds for category, seconds in forward.items()}))
        return total([forward for forward, _ in passes]), total([backward for _, backward in passes])

    def between(self, layer: int) -> tuple[Seconds, Seconds]:
        """Forward and backward of norms, residual additions and rotary embeddings."""
        model = self.config.model
        n = self.bytes
        rows = self.tokens * model.hidden_size / self.parts
        added = model.has_mixer(layer) + model.has_mlp(layer)
        norms = added * (2 if model.norm_placement == "sandwich" else 1)
        channels = self.tokens * (self.queries + self.keys_values(layer)[0]) if model.has_attention(layer) else 0
        rotated = channels * bool(self.attention_kind.rotary_channels)
        normed = channels * (model.qk_layernorm or model.qk_l2_norm)
        forward = n * (rows * (2 * norms + 3 * added) + 2 * rotated + 2 * normed)
        dropped = 2 if model.hidden_dropout else 0
        backward = n * (rows * (3 * norms + (3 + dropped) * added) + 2 * rotated + 3 * normed)
        wider = (self.stream_bytes - n) * rows * added  # a norm reads the residual stream, a sum also writes it
        forward, backward = forward + 3 * wider, backward + 4 * wider
        if model.stream_size > model.hidden_size:  # read for weights and sum; read and written by the mixture
            mixed = self.stream_bytes * rows * added * model.stream_size / model.hidden_size
            forward, backward = forward + 4 * mixed, backward + 8 * mixed
        kernels = norms + added + 2 * bool(rotated) + 2 * bool(normed)
        return (
            {"elements": self.elements(forward), "launches": self.launches(kernels)},
            {"elements": self.elements(backward), "launches": self.launches(2 * kernels)},
        )

    def activation(self, rows: float, width: float) -> tuple[Seconds, Seconds]:
        """Forward and backward of the activation function of an MLP."""
        reads = (3, 5) if self.config.model.gated_linear_unit else (2, 3)
        forward, backward = (self.elements(self.bytes * rows * width * count) for count in reads)
        launches = self.launches(1)
        return {"elements": forward, "launches": launches}, {"elements": backward, "launches": launches}

    def mlp(self, width: float, *, joined: bool = False) -> Passes:
        """A dense MLP of ``width`` over all tensor-parallel ranks; ``joined`` as in ``pair``."""
        hidden, inner = self.config.model.hidden_size, width / self.tp
        gated = 2 if self.config.model.gated_linear_unit else 1
        forward, backward = self.activation(self.tokens, inner)
        pair = self.pair(self.tokens, hidden, gated * inner, inner, hidden, joined=joined)
        return Passes.sum([pair, Passes(forward, backward, {})])

    def replaced(self) -> Passes:
        """A linear layer in place of attention or MLP; tensor-parallel ranks gather its outputs or exchange them."""
        hidden = self.config.model.hidden_size
        ring = self.rings.ring("tp")
        linear = self.linear(self.tokens, hidden, hidden / self.tp)
        size = self.bytes * self.tokens * hidden
        gathering = ring.gather(size)
        moved = ring.all_to_all(size / self.tp) if self.parts > 1 else 0.0
        products = [{"products": seconds, "launches": self.launches(1)} for seconds in linear]
        return Passes(products[0] | {"tp": gathering + moved}, products[1] | {"tp": 2 * gathering + moved}, products[2])

    def experts(self) -> Passes:
        """Router, dispatch, experts and combination, with an equal load of all experts."""
        model: Any = self.config.model
        parallel = self.config.parallel
        hidden, outer = model.hidden_size, model.expert_hidden_size
        etp = parallel.expert_tensor_size
        local_tokens = self.tokens / self.tp
        rows = local_tokens * model.moe_router_topk * etp
        local = (model.num_experts or 1) / parallel.expert_model_parallel_size
        inner = model.expert_ffn_size / etp
        gated = 2 if model.gated_linear_unit else 1
        first = self.linear(rows / local, outer, gated * inner, local)
        second = self.linear(rows / local, inner, outer, local)
        # Of every token: the products of the router, and of latents, which have the same sizes both ways.
        router = self.linear(local_tokens, hidden, (model.num_experts or 1) + 2 * (model.moe_latent_size or 0))
        moved = self.exchange()
        dispatch = self.exchange("moe_dispatch_fwd_dtype")
        gradients = self.exchange("moe_combine_bwd_dtype")
        reducing = 0.0
        if self.tp > 1 and self.parts == 1:
            reducing = self.rings.ring("tp").reduce(self.bytes * self.tokens * hidden)
        forward, backward = self.activation(rows, inner)
        # Permutation for dispatch, sort by expert, and the inverses of both: one read and one write each.
        permuted = self.elements(8 * self.bytes * rows * outer)
        kernels = {"elements": permuted, "launches": self.launches(20 + 2 * local)}
        passes = [
            Passes(
                {"products": first[0] + second[0] + router[0], "ep": dispatch + moved, "tp": reducing},
                {"products": first[1] + second[1] + router[1], "ep": gradients + moved, "tp": reducing},
                {"products": first[2] + second[2] + router[2], "launches": self.launches(2 * local)},
            ),
            Passes(total([forward, kernels]), total([backward, kernels]), {}),
        ]
        if model.moe_shared_expert_intermediate_size is not None:
            passes.append(self.mlp(model.moe_shared_expert_intermediate_size))
        return Passes.sum(passes)

    def exchange(self, dtype_setting: str = "") -> float:
        """Seconds of the dispatch of rows to all ranks with a part of their experts; combination takes as long.

        ``dtype_setting``: name of the setting with the format of the message; default: that of activations.
        """
        model: Any = self.config.model
        parallel = self.config.parallel
        element = 33 / 32 if self.config.optional(dtype_setting) == "mxfp8" else self.bytes
        row = element * self.tokens / self.tp * model.expert_hidden_size
        ring = self.rings.ring(*(("etp", "ep") if parallel.expert_model_parallel_size > 1 else ("etp",)))
        if model.moe_token_dispatcher_type == "alltoall":
            return ring.all_to_all(row * model.moe_router_topk * parallel.expert_tensor_size)
        return ring.gather(row * ring.size)

    # --- whole parts of the model

    def attention(self, layer: int) -> Passes:
        """Projections to queries, keys and values, and the output projection."""
        if not self.config.model.has_mixer(layer):
            return Passes({}, {}, {})
        if self.config.model.block_of(layer).attention.linear:
            return self.replaced()
        *inputs, output = mixer_of(self.config.model, layer).projections(self.tp)
        first = next(projection for projection in inputs if projection.split == "outputs")
        main = self.pair(self.tokens, first.inputs, first.outputs, output.inputs, output.outputs)
        tokens = self.tokens / self.parts
        secondary = [projection for projection in inputs if projection is not first]
        if not secondary:
            return main
        more = [self.linear(self.tokens if other.split else tokens, other.inputs, other.outputs) for other in secondary]
        launches = self.launches(len(more))
        times = [{"products": sum(seconds), "launches": launches} for seconds in zip(*more, strict=True)]
        return Passes.sum([main, Passes(times[0], times[1], times[2])])

    def layer(self, number: int) -> Passes:
        """A layer without recomputation or with selective recomputation."""
        model = self.config.model
        self.eight_bit = number in self.config.training.eight_bit_layers(model.num_layers)
        forward, backward = self.mixing(number)
        before, behind = self.between(number)
        attention = self.attention(number)
        has_experts = model.feed_forward_name(number) == "experts"
        mlp = self.experts() if has_experts else Passes({}, {}, {})
        if model.has_dense_mlp(number):
            mlp = self.mlp(model.of_layer(number).ffn_size, joined=joins_parts(self.config, number))
        elif model.block_of(number).mlp.linear:
            mlp = self.replaced()
        again = [forward] if model.recomputes("core_attn") else []
        again += [mlp.forward] if model.recomputes(feed_forward_of(model, number).recomputed_as) else []
        again += [before] if model.recomputes("layernorm") else []
        has_latents = self.config.optional("multi_latent_attention") and model.has_attention(number)
        if has_latents and model.recomputes("mla_up_proj"):
            again.append({"products": 0.5 * attention.forward["products"]})
        if model.recomputes("moe_act") and has_experts:
            again.append({"elements": 0.3 * mlp.forward["elements"]})
        self.eight_bit = False
        passes = [attention, Passes(forward, total([backward, *again]), {}), mlp, Passes(before, behind, {})]
        return Passes.sum(passes)

    def ahead(self) -> Passes:
        """The layers of multi-token prediction, each with its projection, embedding, and output layer."""
        model = self.config.model
        size = self.bytes * self.tokens * model.hidden_size
        joined = self.linear(self.tokens, 2 * model.hidden_size, model.hidden_size / self.tp)
        gather = 2 * self.rings.ring("tp").gather(size)
        norms = self.elements(10 * size / self.parts)
        projection = Passes(
            {"products": joined[0], "elements": norms, "tp": gather},
            {"products": joined[1], "elements": 1.5 * norms, "tp": gather},
            {"products": joined[2]},
        )
        full = model.recompute_granularity == "full"
        layer = self.recomputed(model.num_layers) if full else self.layer(model.num_layers)
        return Passes.sum([projection, layer, self.embedding(), self.head()] * model.added_layers)

    def recomputed(self, number: int) -> Passes:
        """A layer with full recomputation: backward repeats its forward."""
        passes = self.layer(number)
        return Passes(passes.forward, total([passes.input_grad, passes.forward]), passes.weight_grad, passes.hidden)

    def offloaded(self, number: int) -> Passes:
        """Additional time of a layer whose activations move to the host and back while a layer like it runs."""
        seconds = layer_activations(self.config, number) / self.hardware.host_link
        forward, *backward = self.layer(number).sums
        return Passes({"host": max(seconds - forward, 0.0)}, {"host": max(seconds - sum(backward), 0.0)}, {})

    def embedding(self) -> Passes:
        """The embedding, its reduction over tensor-parallel ranks, positions and dropout."""
        size = self.bytes * self.tokens * self.config.model.hidden_size
        ring = self.rings.ring("tp")
        comm = ring.gather(size) if self.parts > 1 else ring.reduce(size)
        return Passes(
            {"elements": self.elements(4 * size), "launches": self.launches(4), "tp": comm},
            {"elements": self.elements(6 * size), "launches": self.launches(4), "tp": ring.gather(size)},
            {},
        )

    def head(self) -> Passes:
        """The last norm, the output layer and the loss."""
        model = self.config.model
        n = self.bytes
        columns = model.head_columns(padded_vocabulary(self.config, self.vocab_size) // self.tp)
        products = self.linear(self.tokens, model.hidden_size, columns)
        again = products[0] if model.fuses_output_layer_with_loss else 0.0
        ring = self.rings.ring("tp")
        size = n * self.tokens * model.hidden_size
        gather = ring.gather(size) if self.parts > 1 else 0.0
        logits = n * self.tokens * columns
        elements = self.elements(logits + 2 * size / self.parts)
        forward = {"products": products[0], "elements": elements, "tp": gather, "launches": self.launches(6)}
        backward = forward | {
            "products": products[1] + again,
            "elements": self.elements(2 * logits + 3 * size / self.parts),
            "tp": 2 * gather if self.parts > 1 else ring.reduce(size),
        }
        return Passes(forward, backward, {"products": products[2], "launches": self.launches(1)})
