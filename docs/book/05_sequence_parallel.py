"""Chapter 5 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 5. Sequence parallelism and recomputation
#
# With tensor parallelism all ranks of a layer hold the same inputs of the norms, the same residual stream and the same
# dropout masks. Sequence parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
# Models", section 4.2.2) splits these along the sequence: between the matrix products, each rank has 1 / t of the
# tokens.
#
# An all-reduce is a reduce-scatter followed by an all-gather. Tensor parallelism does both at once, after the
# row-parallel layer. Sequence parallelism does the reduce-scatter there, computes residual sum, dropout and norm on its
# part, and does the all-gather before the next column-parallel layer. The backward does the adjoint: a gather becomes a
# reduce-scatter.

# %%
from small_runs import COLOURS, kib, new_figure, print_table, save, train

TP = 4
LAYOUTS = {
    "1 process": (1, {}),
    f"tp{TP}": (TP, {"tensor_model_parallel_size": TP}),
    f"tp{TP} sp": (TP, {"tensor_model_parallel_size": TP, "sequence_parallel": True}),
}
found = {name: train(ranks, 2, global_batch_size=2, **layout)[0] for name, (ranks, layout) in LAYOUTS.items()}
assert all(abs(rank.losses[-1] - found["1 process"].losses[-1]) < 1e-12 for rank in found.values())
rows = []
for name, rank in found.items():
    sent = [rank.sent.get(f"tp {kind}", 0.0) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
    rows.append([name, kib(rank.activations), *map(kib, sent), kib(sum(sent))])
print_table(["layout", "activations", "all-reduce", "reduce-scatter", "all-gather", "together"], rows)
least = found["1 process"].activations / TP
both = [sum(size for name, size in found[layout].sent.items() if name.startswith("tp")) for layout in list(found)[1:]]
surplus = both[1] / both[0] - 1

# %% [markdown]
# A fair share of the activations would be {{ kib(least) }} on each rank. With sequence parallelism a rank keeps
# {{ kib(found["tp4 sp"].activations) }}, without it {{ kib(found["tp4"].activations) }}.
#
# The two forms send equal bytes in the forward. The backward of sequence parallelism needs the gathered input again,
# for the gradient of the weight, and a rank keeps only its part. So it gathers twice; in all,
# {{ "%.0f" | format(100 * surplus) }} % more is sent. This gather can overlap with the product for the gradient of the
# input (section 4.2.2 of the paper).
#
# ## What is kept for the backward
#
# For one layer, 16-bit numbers, s tokens, micro-batch b, width h and a heads, section 4 of the paper counts s b h (34 +
# 5 a s / h) bytes. The last term is the attention matrix, with its softmax and dropout. The planner has the same
# formula for the operations of this library, which compute attention over long sequences in blocks and keep less of
# that term:

# %%
from megatron_core.config import RunConfig
from megatron_core.planner import layer_activations

GPT_22B = {"num_layers": 48, "hidden_size": 6144, "num_attention_heads": 64, "seq_length": 2048, "micro_batch_size": 4}
GPT_22B |= {"vocab_size": 51200, "bf16": True, "mock_data": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}


def gigabytes(**settings: object) -> float:
    """Activations of one layer of the paper's model of 22 billion parameters."""
    return layer_activations(RunConfig.from_flat(GPT_22B | settings)) / 1e9


ways = {
    "one rank": {},
    "tp8": {"tensor_model_parallel_size": 8},
    "tp8 sp": {"tensor_model_parallel_size": 8, "sequence_parallel": True},
    "tp8 sp, attention recomputed": {
        "tensor_model_parallel_size": 8,
        "sequence_parallel": True,
        "recompute_granularity": "selective",
    },
}
s, b, h, a = (GPT_22B[name] for name in ("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads"))
sizes = {"one rank, the paper's formula": s * b * h * (34 + 5 * a * s / h) / 1e9}
sizes |= {name: gigabytes(**settings) for name, settings in ways.items()}
print_table(["22B model", "GB a layer"], [[name, f"{size:.3f}"] for name, size in sizes.items()])

figure, axes = new_figure("GB a layer", "", height=2.2)
axes.barh(list(sizes), list(sizes.values()), color=COLOURS[0])
axes.invert_yaxis()
save(figure, "layer_activations", "activations of a layer of a model of 22 billion parameters")

# %% [markdown]
# ## Recomputation
#
# The other way to save memory is time. With *full* recomputation a layer keeps only its input, and the backward first
# repeats the forward, a third more computation. *Selective* recomputation repeats only the parts with much memory and
# little arithmetic, such as the attention matrix. Measured in our small model:

# %%
RECOMPUTE = {
    "nothing": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
rows = []
for name, settings in RECOMPUTE.items():
    (rank,) = train(1, 2, global_batch_size=2, attention_dropout=0.1, **settings)
    rows.append([name, f"{rank.losses[-1]:.6f}", kib(rank.activations)])
print_table(["recomputed", "loss", "activations"], rows)

# %% [markdown]
# The losses are equal also with dropout, because a mask is a function of seed, layer, sample and position, not of the
# number of calls of a generator.
#
# ## Experiment
#
# Doubling the sequence doubles all terms but one. Change `LENGTH = 64` to `LENGTH = 256`, and compare how the columns
# grow.

# %%
LENGTH = 64
for name in ("nothing", "full"):
    (rank,) = train(1, 1, global_batch_size=2, attention_dropout=0.1, seq_length=LENGTH, **RECOMPUTE[name])
    print(f"{LENGTH} tokens, recomputed {name}: {kib(rank.activations)}")
