"""Chapter 4 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 4. Tensor parallelism and its two collectives
#
# Tensor parallelism splits the matrices of a layer: each rank computes a part of every layer, for the same tokens. ZeRO
# shards *storage*; tensor parallelism also splits the *computation* and, in part, the activations.
#
# ## Two ways to split a matrix
#
# A linear layer y = x A is split by columns of A (each rank has some output features, and needs all of x) or by rows
# (each rank has some input features, and its output is a term of a sum). An MLP is two linear layers with a function of
# single elements between them. If the first is split by columns and the second by rows, the rank's part of the inner
# activations goes directly into its part of the second layer. One sum at the end is enough (Shoeybi et al. 2019,
# "Megatron-LM", section 3):

# %%
import torch
import torch.distributed as dist
from small_runs import SMALL, kib, print_table, train

from megatron_core.verify import run_ranks


class SumOfOutputs(torch.autograd.Function):
    """The paper's g: an all-reduce in the forward, nothing in the backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumOfGradients(torch.autograd.Function):
    """The paper's f: nothing in the forward, an all-reduce in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def mlp() -> dict:
    """Output and gradients of an MLP whose inner width is split over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 8), (8, 32), (32, 8)))
    x.requires_grad_()
    up = up.chunk(size, dim=1)[rank].clone().requires_grad_()  # some columns
    down = down.chunk(size, dim=0)[rank].clone().requires_grad_()  # some rows
    y = SumOfOutputs.apply(torch.nn.functional.gelu(SumOfGradients.apply(x) @ up) @ down)
    (y**2).sum().backward()
    return {"y": y.detach().numpy(), "grad x": x.grad.numpy(), "elements of up": up.numel()}


(alone,), split = run_ranks(1, mlp), run_ranks(4, mlp)
for rank, found in enumerate(split):
    error = max(abs(found[name] - alone[name]).max() / abs(alone[name]).max() for name in ("y", "grad x"))
    share = f"{found['elements of up']} of {alone['elements of up']} elements of up"
    print(f"rank {rank}: {share}, equal to 1e-12: {error < 1e-12}")

# %% [markdown]
# f and g are *adjoint*: seen as a linear map over all ranks, the backward of each is the forward of the other. A layer
# needs both. Without f, each rank continues with only its own term of the gradient of x. Then all layers below get
# wrong gradients, different on each rank, and nothing fails.
#
# Attention is split in the same way: the projections to queries, keys and values by columns, so that a rank has some of
# the heads, and the output projection by rows. So a layer has two pairs, four all-reduces for each micro-batch.
#
# ## The library
#
# `ColumnParallelLinear` and `RowParallelLinear` are these layers. We train the GPT on 1, 2 and 4 ranks and count:

# %%
SIZES = (1, 2, 4)
found = {tp: train(tp, 2, tensor_model_parallel_size=tp, global_batch_size=2)[0] for tp in SIZES}
assert all(abs(rank.losses[-1] - found[1].losses[-1]) < 1e-12 for rank in found.values())
print_table(
    ["tp", "loss", "weights", "activations", "all-reduces", "sent"],
    [
        [
            tp,
            f"{rank.losses[-1]:.6f}",
            kib(rank.state["weights"]),
            kib(rank.activations),
            f"{rank.calls.get('tp all_reduce', 0):g}",
            kib(rank.sent.get("tp all_reduce", 0)),
        ]
        for tp, rank in found.items()
    ],
)

# %% [markdown]
# {{ SMALL["num_layers"] }} layers make {{ 4 * SMALL["num_layers"] }} of the all-reduces, each of s b h =
# {{ "{:,}".format(SMALL["seq_length"] * 2 * SMALL["hidden_size"]) }} numbers. The others belong to the vocabulary,
# whose rows are split as well: the embedding sums rows, of which other ranks have zeros; the logits stay split, and the
# cross entropy exchanges a maximum, a sum and one logit for each token (section 3 of the paper); and the step sums its
# loss and norm.
#
# Three observations:
#
# - **Traffic grows with the tokens**, not with the weights: four times s b h numbers in each layer, in every
#   micro-batch, and the computation waits for most of it. Tensor parallelism belongs between GPUs with the fastest
#   links, in a node.
# - **The matrices shrink**: the product of a rank becomes smaller, while its traffic stays. Many ranks need a large h.
# - **Activations do not fall in proportion**: from {{ kib(found[1].activations) }} to {{ kib(found[4].activations) }}
#   with 4 ranks. Inputs of the norms and dropout masks are stored on every rank. Chapter 5 splits them.
#
# ## Experiment
#
# The number of heads must be divisible by tp. Change `HEADS = 4` to `HEADS = 2`, and read the message. With grouped
# queries (`num_query_groups`) keys and values may have fewer heads than there are ranks: several ranks then hold the
# same ones.

# %%
from megatron_core.errors import MegatronError

HEADS = 4
try:
    rank = train(4, 1, tensor_model_parallel_size=4, num_attention_heads=HEADS)[0]
    print(f"{HEADS} heads: loss {rank.losses[0]:.6f}")
except MegatronError as error:
    print(str(error).splitlines()[-1])
