"""Chapter 12 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 12. Choosing a layout
#
# For a model, a batch and a number of GPUs there are hundreds of layouts. Most do not fit or are slow. The chapters
# before give the rules:
#
# | axis | divides | sends in a step | limited by |
# |---|---|---|---|
# | data (2) | batch | gradients, once | global batch |
# | ZeRO (3) | state | gradients and weights; from stage 2 on in every micro-batch | few micro-batches |
# | tensor (4, 5) | matrices, activations | activations, four times in a layer | fast links, heads |
# | pipeline (6) | layers | activations at a border | bubble: many micro-batches |
# | context (8) | sequence | keys and values | long sequences |
# | expert (9) | experts | tokens, four times in a layer | balance |
#
# So: take the smallest tensor and pipeline sizes with which the model fits, and data parallelism with ZeRO-1 for the
# rest. This is a start, not an answer, because each choice changes the others: less memory permits larger micro-batches
# or less recomputation. The planner therefore computes time and memory of every layout from formulas and measured rates
# of a machine.
#
# ## One model on 64 GPUs

# %%
from small_runs import COLOURS, SMALL, new_figure, print_table, save

from megatron_core.config import RunConfig
from megatron_core.features.presets.published import preset
from megatron_core.planner.explain import details, layout_table, why_slower
from megatron_core.planner.hardware import read_hardware
from megatron_core.planner.layout_settings import describe_layout
from megatron_core.planner.search import Search

GPUS = 64
BATCH = 256
config = RunConfig.from_flat(preset("llama3-70b") | {"bf16": True, "mock_data": True, "global_batch_size": BATCH})
VOCABULARY = config.data.vocab_size
UNTIL_THE_END = float("inf")  # the default stops after 30 s with the best layout so far
search = Search(config, GPUS, read_hardware("h100"), VOCABULARY, seconds=UNTIL_THE_END)
best = search.best(5)
print(layout_table(best, GPUS))
print(f"{search.points:,} points, {search.too_large:,} of the computed layouts do not fit")

# %% [markdown]
# These are predictions, for a machine that this page was not made on; how far they are from published steps is in
# [planner.md](../planner.md#accuracy). Where do time and memory of the first one go?

# %%
print(details(best[0]))

# %% [markdown]
# And why are the others slower?

# %%
for candidate in best[1:]:
    print(f"{describe_layout(candidate.config, GPUS)}:\n    {why_slower(candidate, best[0])}")

# %% [markdown]
# The rule above gives tensor parallelism within a node, a pipeline across nodes and ZeRO-1. Why the planner ranks
# these layouts lower:

# %%
from megatron_core.planner.explain import objection
from megatron_core.planner.layout import Layout

chosen = Layout.of(best[0].config.parallel, best[0].config.model.num_layers, GPUS)
for words in ("tp8 pp2 zero1 mbs1", "tp8 pp4 zero1 mbs1"):
    first, *_, last = objection(search, words, best[0]).splitlines()
    print(f"{first}\n    {last}")

# %% [markdown]
# With {{ "{:,}".format(config.data.seq_length) }} tokens in a sequence, a layer computes longer than its weights take
# to arrive, so that ZeRO-3 is nearly free although there are {{ BATCH // chosen.dp }} micro-batches. On slower links,
# or with short sequences, it is not.
#
# ## The same model on more GPUs
#
# The global batch is fixed by the optimizer, so that each GPU gets less work on a larger cluster:

# %%
sizes = [32, 64, 128]
found = [
    best[0] if gpus == GPUS else Search(config, gpus, search.hardware, VOCABULARY, seconds=UNTIL_THE_END).best(1)[0]
    for gpus in sizes
]
print_table(
    ["GPUs", "tokens/s of a GPU", "layout"],
    [[n, f"{c.cost.tokens_per_second:,.0f}", describe_layout(c.config, n)] for n, c in zip(sizes, found, strict=True)],
)
figure, axes = new_figure("GPUs", "tokens/s of a GPU")
axes.plot(sizes, [c.cost.tokens_per_second for c in found], color=COLOURS[0], marker="o")
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, [str(n) for n in sizes])
axes.set_ylim(0)
save(figure, "scaling", "predicted speed of the best layout by number of GPUs, for a fixed global batch")

# %% [markdown]
# ## Before the job starts
#
# A layout must compute what one process computes. This does not need the GPUs: the shape of the layout on a small
# model, with as many processes as fit on a laptop, finds such errors:

# %%
from megatron_core.verify import GPTExperiment, check_parity

small = str(chosen).replace(f"dp{chosen.dp}", "dp2")
report = check_parity(GPTExperiment(RunConfig.from_flat(SMALL)), [small])
for row in report.rows:
    print(f"{chosen} as {row.layout} on {row.ranks} ranks agrees with one process: {row.holds}")
assert report.holds

# %% [markdown]
# The steps for a real job, each with a page:
#
# 1. `plan_layout`: the fastest layouts, with their commands ([planner.md](../planner.md)).
# 2. `verify_layout`: the comparison with one process, also with a thousand simulated ranks
#    ([verification.md](../verification.md)).
# 3. A few steps on the cluster, then `diagnose`: what takes the time ([monitoring.md](../monitoring.md)).
#
# ## Experiment
#
# A smaller batch leaves less work for each GPU. Change `BATCH = 256` to `BATCH = 1024`. Which layouts win now, and on
# which number of GPUs does the speed begin to fall?
