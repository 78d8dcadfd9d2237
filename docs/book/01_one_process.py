"""Chapter 1 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 1. One process
#
# This book trains the same small GPT in every layout of Megatron: data, tensor, sequence, pipeline, context and expert
# parallel, on two cores of a laptop. Each page is a program. It was run to make the page, and all numbers, also those
# in the text, come from that run. From a clone, `python docs/book/01_one_process.py` runs this chapter.
#
# We begin with one process, because everything later is compared with it. The model is small enough for several
# trainings in a minute; its settings have the names of the flags of `pretrain_gpt.py`:

# %%
from math import log

from small_runs import SMALL, kib, new_figure, print_table, save, start, train

for name, value in SMALL.items():
    print(f"{name:22} {value}")

# %% [markdown]
# The data are arithmetic sequences modulo the size of the vocabulary, with {{ SMALL["vocab_size"] }} tokens. A model
# that predicts all tokens with equal probability has a loss of
# ln {{ SMALL["vocab_size"] }} = {{ "%.3f" | format(log(SMALL["vocab_size"])) }}; the
# optimum is close to 0, since the second token determines all later ones. We compute in 64 bits, so that rounding
# cannot hide an error. A step of the optimizer takes `global_batch_size` samples. They do not have to be in memory
# together: the model processes micro-batches of `micro_batch_size` samples, and the gradients are summed.

# %%
STEPS = 60
(one,) = train(steps=STEPS)
figure, axes = new_figure("step", "loss")
axes.plot(range(1, STEPS + 1), one.losses, label="training")
axes.axhline(log(SMALL["vocab_size"]), color="grey", linestyle="dotted", label="a uniform guess")
save(figure, "one_process", "the training loss falls from that of a uniform guess")
print(f"loss {one.losses[0]:.4f} at step 1, {one.losses[-1]:.4f} at step {STEPS}")

# %% [markdown]
# ## Where does the memory go?
#
# A rank, that is a process with its device, holds four things. We count the weights by part of the model:

# %%
from megatron_core.verify import run_ranks


def count_parameters() -> dict[str, int]:
    """Elements of the weights, by part of the model."""
    (stage,) = start().stages.values()
    counts: dict[str, int] = {}
    for name, weight in stage.named_parameters():
        part = "embeddings" if "embedding" in name else name.split(".")[-2]
        counts[part] = counts.get(part, 0) + weight.numel()
    return counts


(counts,) = run_ranks(1, count_parameters)
print_table(["part", "parameters"], [[part, f"{count:,}"] for part, count in counts.items()])
total = sum(counts.values())
print(f"together {total:,}")

# %% [markdown]
# and all four in bytes:

# %%
memory = one.state | {"activations": one.activations}
print_table(["kind", "memory"], [[kind, kib(size)] for kind, size in memory.items()])

# %% [markdown]
# - **Weights**: {{ SMALL["num_layers"] }} layers with 12 h² weights each, h = {{ SMALL["hidden_size"] }}, plus
#   embeddings, at {{ one.state["weights"] // total }} bytes a number.
# - **Gradients**: as many numbers as weights.
# - **Optimizer state**: Adam keeps two moments of each gradient, {{ one.state["optimizer"] // one.state["weights"] }}
#   times the weights.
# - **Activations**: tensors that the forward keeps for the backward. They alone depend on the batch: they grow with
#   micro-batch, sequence length and layers.
#
# The first three are the *model state*. Large models are trained with weights in 16 bits; gradients, main weights and
# moments stay in 32 bits (chapter 10):

# %%
from megatron_core.planner import state_by_kind

each = sum(state_by_kind("bfloat16").values())
terabytes = 70e9 * each / 1e12
print(f"{each:g} bytes for each parameter; a model of 70 billion parameters: {terabytes:.2f} TB")

# %% [markdown]
# (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3.1, has 16,
# with gradients in 16 bits.) This is more than ten GPUs have, before the first activation. So a model must be split,
# and there are three things to split: the batch (chapters 2 and 3), the matrices and activations of a layer (4, 5, 8
# and 9), and the sequence of the layers (6).

# %% [markdown]
# ## Experiment
#
# Gradients of micro-batches are summed, so that the micro-batch size should not change the result. Change `MICRO = 4`
# to `MICRO = 1`: which of the four kinds of memory changes, by which factor, and does the loss?

# %%
MICRO = 4
(other,) = train(steps=3, micro_batch_size=MICRO)
is_equal = all(abs(a - b) < 1e-12 for a, b in zip(one.losses, other.losses, strict=False))
print(f"activations {kib(other.activations)}, {kib(one.activations)} before; equal losses: {is_equal}")
