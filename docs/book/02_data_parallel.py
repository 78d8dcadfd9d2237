"""Chapter 2 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 2. Data parallelism
#
# Every rank has the whole model and a part of the batch. After the backward the gradients are summed over the ranks, so
# that all take the same step and their weights stay equal. That is all; the details are in the word "summed".
#
# ## By hand
#
# Four sequences have different numbers of tokens that count in the loss, as real data has. Each rank takes every second
# sequence. We compare two ways to combine the gradients with one process: divide the sum of all losses by the number of
# all tokens, or average the ranks' own means.

# %%
import numpy as np
import torch
import torch.distributed as dist
from small_runs import kib, print_table, train

from megatron_core.verify import run_ranks

LENGTHS = [8, 1, 8, 3]


def gradient(*, mean_of_means: bool) -> np.ndarray:
    """The gradient of a linear layer over the sequences of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 4, generator=generator, dtype=torch.float64)
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mine = slice(rank, None, size)

    losses = ((x[mine] @ weight) ** 2 * mask[mine]).sum()
    tokens = mask[mine].sum().double()
    if mean_of_means:
        (losses / tokens).backward()
        dist.all_reduce(weight.grad)
        return (weight.grad / size).numpy()
    losses.backward()
    dist.all_reduce(weight.grad)
    dist.all_reduce(tokens)
    return (weight.grad / tokens).numpy()


(alone,) = run_ranks(1, lambda: gradient(mean_of_means=False))
errors = {}
for name, mean_of_means in (("sum / number of all tokens", False), ("mean of the ranks' means", True)):
    first, second = run_ranks(2, lambda way=mean_of_means: gradient(mean_of_means=way))
    assert (first == second).all()
    errors[name] = np.abs(first - alone).max() / np.abs(alone).max()
wrong = errors["mean of the ranks' means"]
print_table(["two ranks", "error"], [[way, f"{e:.2g}" if e > 1e-12 else "< 1e-12"] for way, e in errors.items()])

# %% [markdown]
# The mean of means is wrong by {{ "%.0f" | format(100 * wrong) }} %, because a token counts more on a rank that has few
# of them. Nothing fails, and the loss still falls. One rule avoids this error in every layout: *gradients are summed,
# never averaged, and divided once by the number of tokens of the global batch.*
#
# ## The library
#
# Now the GPT of chapter 1. A rank processes its part of each global batch, in micro-batches; after the last one the
# gradients are summed.

# %%
STEPS = 5
(one,) = train(1, STEPS)
two = train(2, STEPS)
print_table(
    ["step", "one process", "two ranks"],
    [[step, f"{a:.6f}", f"{b:.6f}"] for step, (a, b) in enumerate(zip(one.losses, two[0].losses, strict=True), 1)],
)
worst = max(abs(a - b) for rank in two for a, b in zip(one.losses, rank.losses, strict=True))
bound = 1e-12
assert worst < bound

# %% [markdown]
# The losses agree to {{ bound }}. They are not always equal to the bit, because the gradients are summed in another
# order: [equal_bits.md](../equal_bits.md) is about that.
#
# ## What it costs
#
# The sum is an *all-reduce*. In a ring of n ranks each one sends 2 (n - 1) / n times the bytes of its gradients: first
# each rank sums one part of them (a reduce-scatter), then it sends this part to the others (an all-gather). The library
# counts what each rank sends:

# %%
rows = []
for ranks in (2, 4):
    found = train(ranks, 2)[0]
    sent, formula = found.sent["dp all_reduce"], 2 * (ranks - 1) / ranks * found.state["gradients"]
    rows.append([ranks, kib(sent), kib(formula), kib(sum(found.state.values())), kib(found.activations)])
print_table(["ranks", "sent in a step", "2 (n-1)/n gradients", "state of a rank", "activations"], rows)

# %% [markdown]
# Three observations:
#
# - The traffic of a rank hardly grows with the number of ranks: data parallelism scales to large clusters, as long as
#   the global batch can be divided.
# - It does not depend on the number of micro-batches. A larger batch per step costs no more communication.
# - The memory of a rank does not change at all: each rank has all weights, gradients and moments. Chapter 3 changes
#   that.
#
# The sum need not wait for the end of the backward: gradients of the last layers are complete first.
# `overlap_grad_reduce` groups parameters into *buckets* and starts the sum of each as soon as its last gradient is
# complete (Li et al. 2020, "PyTorch Distributed", section 3.2). With smaller buckets there are more sums, and the
# losses agree as before:

# %%
overlapped = train(2, STEPS, overlap_grad_reduce=True, ddp_bucket_size=40_000)[0]
assert max(abs(a - b) for a, b in zip(one.losses, overlapped.losses, strict=True)) < bound
print(f"{overlapped.calls['dp all_reduce']:g} all-reduces in a step, {two[0].calls['dp all_reduce']:g} before")

# %% [markdown]
# ## Experiment
#
# The batch is divided over 2 ranks. Change `RANKS = 2` to `RANKS = 4`. Which numbers change? Which would change with a
# `global_batch_size` twice as large?

# %%
RANKS = 2
found = train(RANKS, 2)[0]
print(f"loss {found.losses[1]:.6f}, sent {kib(found.sent['dp all_reduce'])}, {found.calls['dp all_reduce']:g} calls")
