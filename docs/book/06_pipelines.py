"""Chapter 6 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 6. Pipelines and bubbles
#
# A pipeline splits the sequence of layers: rank 0 has the first ones, and sends its output to rank 1. It communicates
# only one activation at each border. But a rank must wait for the one before it, and in the backward for the one after
# it. So a step is cut into micro-batches that follow one another. The time in which ranks wait is the *bubble*.
#
# ## A schedule is a list
#
# For each rank a schedule is a list of forwards (F) and backwards (B) of micro-batches. It can be drawn before anything
# runs. GPipe (Huang et al. 2019) computes all forwards, then all backwards:

# %%
from small_runs import COLOURS, PICTURES, kib, new_figure, print_table, save, train

from megatron_core.planner.simulate import Costs, simulate
from megatron_core.reports.plot import plot_timelines
from megatron_core.reports.timelines import timeline_picture
from megatron_core.schedules import make_plan

P, M = 4, 8


def timeline(name: str, micro_batches: int = M):
    """A simulated step; a backward takes twice as long as a forward."""
    chunks = 2 if name in ("interleaved", "zb_v") else 1
    return simulate(make_plan(name, P, chunks, micro_batches), Costs())


print(timeline_picture(timeline("gpipe"), f"GPipe, {P} ranks, {M} micro-batches", width=100))

# %% [markdown]
# With p ranks and m micro-batches each rank waits for (p - 1) micro-batches, so that the bubble is (p - 1) / (m + p -
# 1) of the step. At the right is the peak of the stored activations: GPipe keeps all {{ M }} micro-batches.
#
# 1F1B (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
# section 2.2) alternates: once a backward can run, it runs. The bubble is the same, the memory is not:

# %%
print(timeline_picture(timeline("1f1b"), f"1F1B, {P} ranks, {M} micro-batches", width=100))
formula = (P - 1) / (M + P - 1)
assert abs(timeline("1f1b").bubble - formula) < 1e-12 and abs(timeline("gpipe").bubble - formula) < 1e-12

# %% [markdown]
# The formula gives {{ "%.1f" | format(100 * formula) }} %. There are three ways to a smaller bubble:
#
# - **More micro-batches**, as many as the batch permits.
# - **Interleaving** (the same paper): each rank has v chunks of layers, rank 0 for example layers 1 and 5. The pipeline
#   fills v times as fast: (p - 1) / (v m + p - 1), with v times as many messages.
# - **Zero bubble** (Qi et al. 2023): a backward has two parts, the gradient of the input (I), which the previous
#   rank needs, and the gradient of the weights (W), which no other rank needs. W fills the gaps.

# %%
names = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved, v = 2", "zb_h1": "ZB-H1", "zb_v": "ZB-V"}
steps = [(names[name], timeline(name)) for name in ("1f1b", "interleaved", "zb_h1")]
plot_timelines(steps, PICTURES.path("schedules.png", "three schedules of four ranks and eight micro-batches"))

# %% [markdown]
# The bubble by number of micro-batches:

# %%
counts = [4, 8, 16, 32, 64]
figure, axes = new_figure("micro-batches", "bubble (%)")
for (name, label), colour in zip(names.items(), COLOURS, strict=False):
    if name == "gpipe":
        continue
    bubbles = [100 * timeline(name, m).bubble for m in counts]
    axes.plot(counts, bubbles, color=colour, marker="o", label=label)
axes.set_xscale("log", base=2)
axes.set_xticks(counts, [str(m) for m in counts])
save(figure, "bubbles", "the bubble falls with the number of micro-batches")

# %% [markdown]
# ## The same lists, executed
#
# The library runs these lists. On two ranks, with eight micro-batches:

# %%
(one,) = train(1, 2, micro_batch_size=1)
rows = []
for name in ("gpipe", "1f1b", "zb_h1"):
    ranks = train(2, 2, pipeline_model_parallel_size=2, micro_batch_size=1, pipeline_schedule=name)
    assert all(abs(rank.losses[-1] - one.losses[-1]) < 1e-12 for rank in ranks)
    rows.append([names[name], kib(ranks[0].activations), kib(ranks[1].activations), kib(ranks[0].sent["pp send"])])
print_table(["schedule", "activations of rank 0", "of rank 1", "sent by rank 0"], rows)

# %% [markdown]
# The losses are those of one process. With GPipe a rank keeps its activations of all micro-batches, with 1F1B rank 0
# those of two and rank 1 those of one, as in the drawing; rank 1 also keeps the logits of its micro-batches. A message
# has s b h numbers, once for each micro-batch and border. This is the least traffic of all layouts, and it goes from
# one rank to one other. Pipelines therefore connect nodes.
#
# ## Experiment
#
# ZB-H2 permits more activations and removes the bubble. Change `NAME = "zb_h1"` to `NAME = "zb_h2"`, and read bubble
# and peak. Costs are times of F, I and W: what happens if W takes less time?

# %%
NAME = "zb_h1"
print(timeline_picture(simulate(make_plan(NAME, P, 1, M), Costs(1, 1, 1)), NAME, width=110))
