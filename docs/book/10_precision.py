"""Chapter 10 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 10. Precision and FP8
#
# So far we computed in 64 bits, to compare layouts. Training uses 16 bits and, in part, 8: half the bits are half the
# memory and half the traffic, and the matrix units of a GPU are at least twice as fast.
#
# ## Range and resolution
#
# A floating-point number has bits for the exponent, which give the range, and for the mantissa, which give the
# resolution:

# %%
import torch
from small_runs import COLOURS, new_figure, print_table, save, start, train

from megatron_core.verify import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
print_table(
    ["format", "bytes", "largest", "smallest normal", "step at 1"],
    [
        [
            str(dtype).removeprefix("torch."),
            torch.finfo(dtype).bits // 8,
            f"{torch.finfo(dtype).max:.3g}",
            f"{torch.finfo(dtype).tiny:.3g}",
            f"{torch.finfo(dtype).eps:.3g}",
        ]
        for dtype in DTYPES
    ],
)

# %% [markdown]
# ## Small updates are lost
#
# A step of the optimizer changes a weight by perhaps a thousandth of its size. In bfloat16 that is less than half of
# the distance to the next number, and rounding restores the old weight:

# %%
UPDATE, COUNT = 1e-3, 1000
rows = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    weight = torch.tensor(1.0, dtype=dtype)
    for _ in range(COUNT):
        weight += torch.tensor(UPDATE, dtype=dtype)
    rows.append([str(dtype).removeprefix("torch."), f"{weight.item():.4f}"])
print_table(["format", f"1 + {COUNT} x {UPDATE}"], rows)

# %% [markdown]
# Therefore *mixed precision* (Micikevicius et al. 2017) keeps a *main weight* in 32 bits for the optimizer, and
# computes forward and backward with its copy in 16 bits. Gradients of several micro-batches are sums of many small
# numbers, and are also summed in 32 bits. This is where the bytes for each parameter of chapter 1 come from.
#
# ## Small gradients are lost
#
# bfloat16 has the range of float32. float16 does not: numbers below its smallest one become 0. We look at the gradients
# of a step:


# %%
def gradients() -> torch.Tensor:
    """All gradients of the first step, in float32."""
    from megatron_core.training.driver import StepHooks
    from megatron_core.training.step import train_step

    run, found = start(fp64=False), []
    hooks = StepHooks(
        before_update=lambda: found.extend(bucket.grad_shard.clone() for bucket in run.data_parallel.buckets)
    )
    train_step(run, hooks=hooks)
    return torch.cat(found).numpy()


(values,) = run_ranks(1, gradients)
values = torch.from_numpy(values)
values = values[values != 0] / 1000  # as in a model of many more tokens and layers
SCALES = [1, 2**4, 2**8, 2**12, 2**16]
lost = [(values * scale).half().eq(0).double().mean().item() for scale in SCALES]
print_table(
    ["loss scale", "gradients that become 0"],
    [[scale, f"{share:.1%}"] for scale, share in zip(SCALES, lost, strict=True)],
)

# %% [markdown]
# *Loss scaling* multiplies the loss, and so all gradients, by a power of two before the backward, and divides by it
# before the update. The scale is raised until a gradient overflows; then the step is skipped and the scale halved. With
# bfloat16 this is not needed, which is why it is the usual choice.
#
# ## Eight bits
#
# In 8 bits a tensor needs a scale of its own, which maps its largest number to the largest of the format. One outlier
# then makes all others small, so that they lose resolution or become 0. More scales, for rows or blocks, confine the
# damage (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; DeepSeek-V3, section 3.3, for blocks):

# %%
from megatron_core.features.fp8.casts import E4M3, Blocks, quantise

generator = torch.Generator().manual_seed(1)
matrix = torch.randn(256, 256, generator=generator)
matrix[7, 11] = 1e5
for name, blocks in {"a matrix": Blocks(), "a row": Blocks(1, None), "128 x 128": Blocks(128, 128)}.items():
    error = (quantise(matrix, E4M3, blocks).dequantised(torch.float32) - matrix).abs()
    others = matrix.abs() < 100
    print(f"one scale for {name}: mean error of the others {error[others].mean() / matrix[others].abs().mean():.1%}")

# %% [markdown]
# Sums stay in 32 bits, and in the linear layers only the products are in 8 bits. Does that train?

# %%
STEPS = 40
RUNS = {
    "float32": {"fp64": False},
    "bfloat16": {"fp64": False, "bf16": True},
    "FP8, a scale for 32 elements": {"fp64": False, "bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
}
figure, axes = new_figure("step", "loss")
ends = []
for (name, settings), colour in zip(RUNS.items(), COLOURS, strict=False):
    (rank,) = train(1, STEPS, **settings)
    axes.plot(range(1, STEPS + 1), rank.losses, color=colour, label=name)
    ends.append([name, f"{rank.losses[-1]:.2f}"])
save(figure, "precision", "training loss in three precisions")
print_table(["precision", f"loss at step {STEPS}"], ends)

# %% [markdown]
# The curves are close. On a CPU FP8 is slower, as it is emulated; on GPUs it is faster for large matrices only, because
# scales and casts read every matrix once more ([fp8.md](../fp8.md)).
#
# A layout must not change the numbers here either: all ranks of a tensor that is split need the same scale, from the
# largest number over all of them. If each used its own, the result would depend on the layout.
#
# ## Experiment
#
# Change `UPDATE, COUNT = 1e-3, 1000` to `UPDATE, COUNT = 5e-3, 200`. The sum is the same: which formats are right now,
# and why is bfloat16 wrong in the other direction?
