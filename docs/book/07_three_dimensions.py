"""Chapter 7 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 7. Three dimensions
#
# Tensor, pipeline and data parallelism are independent: a rank has an index on each axis. Eight ranks of tp2 pp2 dp2
# hold two copies of the model, each in two stages, and each layer is split over two ranks. This is Megatron-LM's 3D
# parallelism. What remains to choose is the order of the axes: which ranks are neighbours?
#
# ## Ranks and groups
#
# The first axis has consecutive ranks. Megatron-LM's order is tp, cp, ep, dp, pp (Narayanan et al. 2021, section 3), so
# that tensor parallelism, with the most traffic, stays in a node, and pipelines, with the least, go across:

# %%
from small_runs import kib, print_table, train

from megatron_core.parallel.grid import Grid

grid = Grid(tp=2, pp=2, dp=2)
print_table(
    ["rank", "tp", "dp", "pp", "tp group", "dp group", "pp group"],
    [
        [
            rank,
            *(grid.coordinates(rank)[axis] for axis in ("tp", "dp", "pp")),
            *(",".join(map(str, grid.group_of(rank, axis))) for axis in ("tp", "dp", "pp")),
        ]
        for rank in range(grid.world_size)
    ],
)

# %% [markdown]
# ## Traffic by axis
#
# All axes at once, on eight processes. The two cores compute in turns, but what a rank sends does not depend on that:

# %%
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
LAYOUT |= {"zero_stage": 1, "micro_batch_size": 1}
(one,) = train(1, 2)
ranks = train(8, 2, **LAYOUT)
assert all(abs(rank.losses[-1] - one.losses[-1]) < 1e-12 for rank in ranks)


def by_axis(rank) -> dict[str, float]:
    """Bytes sent in a step over each axis; collectives over several axes, which are small, count as others."""
    found = dict.fromkeys(("tp", "dp", "pp", "others"), 0.0)
    for name, size in rank.sent.items():
        group = name.split()[0]
        found[group if group in found else "others"] += size
    return found


rows = [[number, *map(kib, by_axis(rank).values())] for number, rank in enumerate(ranks)]
print_table(["rank", "tp", "dp", "pp", "others"], rows)
print(f"loss {ranks[0].losses[-1]:.6f}, in one process {one.losses[-1]:.6f}")

# %% [markdown]
# Even with a small batch tensor parallelism sends most. The numbers grow differently: tp and pp with the tokens of a
# step, dp with the parameters of a rank. tp and pp divide the weights, so that they also divide the traffic of dp.
#
# ## Does it compute the same?
#
# Equal losses are not enough: a wrong gradient of one layer shows in the loss only later. The library compares losses,
# *every* gradient, norms and weights of three steps with one process:

# %%
from small_runs import SMALL

from megatron_core.config import RunConfig
from megatron_core.verify import GPTExperiment, check_parity

LAYOUTS = ["tp2 pp2 sp", "pp2 dp2 zero1 overlap", "tp2 pp2 dp2 sp zero1"]
report = check_parity(GPTExperiment(RunConfig.from_flat(SMALL | {"micro_batch_size": 1})), LAYOUTS)
print_table(
    ["layout", "ranks", "gradients agree to 1e-9"],
    [[row.layout, row.ranks, row.gradient.error < 1e-9] for row in report.rows],
)
assert report.holds

# %% [markdown]
# The same as a command for any configuration, also for a thousand ranks on one machine, is
# [verify_layout](../verification.md).
#
# ## Experiment
#
# With tp last in the order, tensor-parallel ranks are far apart. Change `ORDER = "tp-dp-pp"` to
# `ORDER = "dp-pp-tp"`. On nodes of two GPUs, which axis would now cross nodes?

# %%
ORDER = "tp-dp-pp"
for axis in ("tp", "dp", "pp"):
    print(axis, Grid(tp=2, pp=2, dp=2, order=ORDER).groups(axis))
