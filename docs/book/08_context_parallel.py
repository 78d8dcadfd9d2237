"""Chapter 8 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 8. Context parallelism
#
# A long sequence does not fit on a rank. Sequence parallelism splits it only between the matrix products, and over few
# ranks. Context parallelism splits it everywhere: each rank has some tokens, all heads and all weights. Linear layers
# and norms need no exchange, as they process single tokens. Attention does: a query needs the keys and values of all
# tokens before.
#
# ## Softmax in parts
#
# Attention over all keys can be computed from attention over parts of them. Part i gives an output o_i and the
# log-sum-exp l_i of its scores. With l = log sum exp(l_i), the output is the sum of exp(l_i - l) o_i (Dao et al. 2022,
# FlashAttention, section 3.1; Liu et al. 2023, "Ring Attention", for several ranks):

# %%
import torch
from small_runs import COLOURS, SMALL, kib, new_figure, print_table, save, train

generator = torch.Generator().manual_seed(1)
query, key, value = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3))


def attention(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp for some keys."""
    scores = query @ key.T
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


whole, _ = attention(key, value)
parts = [attention(key[some], value[some]) for some in (slice(0, 2), slice(2, 6))]
total = torch.stack([lse for _, lse in parts]).logsumexp(0)
merged = sum((lse - total).exp()[:, None] * out for out, lse in parts)
print("equal to 1e-12:", bool((merged - whole).abs().max() < 1e-12))

# %% [markdown]
# So keys and values can travel from rank to rank in a ring, while each rank computes with those that it has.
#
# ## Who has which tokens?
#
# With a causal mask a query sees only the keys before it. If rank 0 has the first quarter of the sequence and rank 3
# the last, rank 3 has most of the work and the others wait. Megatron-LM cuts the sequence into 2 n chunks and gives
# rank i the chunks i and 2 n - 1 - i, one early and one late:

# %%
RANKS, LENGTH = 4, 64
chunk = LENGTH // (2 * RANKS)


def pairs(positions: list[int]) -> int:
    """Pairs of a query at one of these positions and a visible key."""
    return sum(position + 1 for position in positions)


plain = [list(range(rank * 2 * chunk, (rank + 1) * 2 * chunk)) for rank in range(RANKS)]
balanced = [
    [*range(rank * chunk, (rank + 1) * chunk), *range((2 * RANKS - 1 - rank) * chunk, (2 * RANKS - rank) * chunk)]
    for rank in range(RANKS)
]
print_table(
    ["rank", "pairs, in order", "pairs, early and late"],
    [[rank, pairs(plain[rank]), pairs(balanced[rank])] for rank in range(RANKS)],
)
waste = max(map(pairs, plain)) / (sum(map(pairs, plain)) / RANKS)

# %% [markdown]
# In order, attention would take {{ "%.2f" | format(waste) }} times as long as with equal work. The planner counts the
# same, for all kinds of attention:

# %%
from megatron_core.config import RunConfig
from megatron_core.planner.context import layer_pairs

config = RunConfig.from_flat(SMALL | {"seq_length": LENGTH, "context_parallel_size": RANKS})
print([layer_pairs(config, 0, rank) for rank in range(RANKS)])

# %% [markdown]
# ## Three ways to exchange
#
# - **ring** (`p2p`): keys and values travel, and overlap with attention; in the backward also their gradients.
# - **all-gather**: keys and values of all ranks at once. Simple, but they are all in memory.
# - **all-to-all** (DeepSpeed-Ulysses, Jacobs et al. 2023): tokens are exchanged for heads. For the attention a rank has
#   *all* tokens of *some* heads, so that n may not exceed the number of heads.

# %%
(one,) = train(1, 2, global_batch_size=2)
found = {
    kind: train(RANKS, 2, global_batch_size=2, context_parallel_size=RANKS, cp_comm_type=(kind,))[0]
    for kind in ("p2p", "all_gather", "a2a")
}
assert all(abs(rank.losses[-1] - one.losses[-1]) < 1e-12 for rank in found.values())
rows = [["one process", kib(one.activations), "", ""]]
for kind, rank in found.items():
    sent = sum(size for name, size in rank.sent.items() if name.startswith("cp") and "all_reduce" not in name)
    rows.append([kind, kib(rank.activations), kib(sent), kib(rank.sent["cp all_reduce"])])
print_table(["kind", "activations", "sent for attention", "for gradients"], rows)

# %% [markdown]
# Activations fall with the number of ranks. The last column is the sum of the gradients: for weights, a
# context-parallel rank is like a data-parallel one, with some tokens of the batch. ZeRO therefore shards over both axes
# together.
#
# The traffic of a ring grows with the tokens, and the arithmetic of attention with their square. So the ring is hidden
# for long sequences, and only for them:

# %%
from megatron_core.planner.context import attention_flops, traffic

figure, axes = new_figure("tokens", "operations / byte sent")
lengths = [2**power for power in range(10, 18)]
heads, width = 32, 128
for kind, colour in zip(("p2p", "a2a"), COLOURS, strict=False):
    ratios = []
    for length in lengths:
        shape = {"num_layers": 1, "hidden_size": heads * width, "num_attention_heads": heads, "seq_length": length}
        layout = {"context_parallel_size": 8, "cp_comm_type": (kind,), "bf16": True, "fp64": False}
        long = RunConfig.from_flat(SMALL | shape | layout)
        ratios.append(attention_flops(long, [0], 0) / traffic(long, [0]).forward)
    axes.plot(lengths, ratios, marker="o", color=colour, label=kind)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
save(figure, "context_intensity", "arithmetic of attention for each byte sent, which grows with the length")

# %% [markdown]
# ## Experiment
#
# Change `KIND = "p2p"` to `KIND = "a2a"`, then set `num_query_groups` to 1: keys and values have fewer heads. For which
# kind does the traffic fall, and what must all-to-all do if there are fewer such heads than ranks?

# %%
KIND = "p2p"
rank = train(2, 1, context_parallel_size=2, cp_comm_type=(KIND,), group_query_attention=True, num_query_groups=2)[0]
print(KIND, {name: kib(size) for name, size in sorted(rank.sent.items())})
