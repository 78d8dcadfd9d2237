"""Chapter 3 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 3. ZeRO
#
# Data parallelism stores the same weights, gradients and moments on every rank. ZeRO (Rajbhandari et al. 2020) removes
# the copies in three stages, and FSDP is its third one: each rank *stores* one part, a shard, and the ranks exchange
# what a computation needs.
#
# | stage | sharded | exchange in a step |
# |---|---|---|
# | 0 | nothing | all-reduce of the gradients |
# | 1 | optimizer state | reduce-scatter of the gradients, update of the own shard, all-gather of the weights |
# | 2 | also gradients | the same; a layer's gradients are reduced and freed during the backward |
# | 3 | also weights | a layer's weights are gathered before its forward and before its backward, then freed |
#
# ## Memory
#
# Every rank has one micro-batch in a step.

# %%
from small_runs import COLOURS, kib, new_figure, print_table, save, train

RANKS = 4
found = [train(RANKS, 2, zero_stage=stage, global_batch_size=2 * RANKS)[0] for stage in range(4)]
kinds = ("weights", "gradients", "optimizer")
rows = [[stage, *(kib(rank.state[kind]) for kind in kinds)] for stage, rank in enumerate(found)]
print_table(["stage", *kinds], rows)
totals = [sum(rank.state[kind] for kind in kinds) for rank in found]

figure, axes = new_figure("ZeRO stage", "KiB on a rank")
bottom = [0.0] * len(found)
for kind, colour in zip(kinds, COLOURS, strict=False):
    heights = [rank.state[kind] / 1024 for rank in found]
    axes.bar(range(len(found)), heights, bottom=bottom, color=colour, label=kind, width=0.6)
    bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
axes.set_xticks(range(len(found)))
save(figure, "zero_memory", "model state of a rank by ZeRO stage: each divides one more kind by the number of ranks")

# %% [markdown]
# Each stage divides one more kind by {{ RANKS }} ranks: the state of a rank falls from {{ kib(totals[0]) }} to
# {{ kib(totals[3]) }}. The formula of the paper, here in the planner, gives the same for a parameter:

# %%
from megatron_core.planner import state_by_kind

parameters = found[0].state["weights"] / 8
for stage in range(4):
    formula = sum(state_by_kind("float64", RANKS, zero_stage=stage).values())
    print(f"stage {stage}: {formula:g} bytes for a parameter by formula, {totals[stage] / parameters:.2f} measured")

# %% [markdown]
# ## Traffic
#
# The losses do not depend on the stage. What does a rank send?

# %%
assert all(abs(rank.losses[-1] - found[0].losses[-1]) < 1e-12 for rank in found)
collectives = ("all_reduce", "reduce_scatter", "all_gather")
shares = [
    {name: rank.sent.get(f"dp {name}", 0.0) / found[0].state["gradients"] for name in collectives} for rank in found
]
sums = [sum(share.values()) for share in shares]
rows = [[stage, *(f"{part:.2f}" for part in (*share.values(), sums[stage]))] for stage, share in enumerate(shares)]
print_table(["stage", *collectives, "together"], rows)

# %% [markdown]
# in units of the size of the gradients. An all-reduce is a reduce-scatter followed by an all-gather, so that stages 1
# and 2 cost no more than plain data parallelism. Stage 3 gathers the weights twice, and sends
# {{ "%.2f" | format(sums[3] / sums[0]) }} times as much (section 7 of the paper has 1.5; here the last unit stays
# gathered between its forward and its backward).
#
# That is for one micro-batch. With several, stage 1 still communicates once in a step, while stage 3 gathers in each of
# them, and from stage 2 on gradients are reduced in each:

# %%
MICRO_BATCHES = 4
rows = []
for stage in range(4):
    rank = train(2, 1, zero_stage=stage, global_batch_size=2 * 2 * MICRO_BATCHES)[0]
    sent = sum(size for name, size in rank.sent.items() if name.startswith("dp"))
    rows.append([stage, f"{sent / found[0].state['gradients']:.2f}"])
print_table(["stage", f"sent by one of 2 ranks, {MICRO_BATCHES} micro-batches"], rows)

# %% [markdown]
# So stage 1 is the usual choice next to a pipeline, which needs many micro-batches, and stage 3 without one, with one
# or two large micro-batches.
#
# ## Experiment
#
# Change `MICRO_BATCHES = 4` to `MICRO_BATCHES = 1`, then to 8, and find the formula for each stage: a + b n for n
# micro-batches.
