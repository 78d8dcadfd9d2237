"""Chapter 15 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 15. Reading a trace
#
# A run is slower than planned. A trace tells where the time is: for each rank, when it computed what, and when it
# waited. This chapter draws traces of known causes first, so that you recognise their shapes, and then traces a run in
# which one rank is made slow.
#
# ## Shapes
#
# Four ranks, eight micro-batches, one forward and one backward at a time. If all stages take the same time, the only
# gaps are those of the schedule, at both ends:

# %%
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO

from small_runs import print_table, start

from megatron_core.planner.simulate import StageCosts, simulate
from megatron_core.reports.timelines import timeline_picture
from megatron_core.reports.trace_files import measured_costs, read_trace
from megatron_core.schedules import make_plan
from megatron_core.training.callbacks import Callback
from megatron_core.training.loop import train
from megatron_core.verify import run_ranks

P, M = 4, 8
PLAN = make_plan("1f1b", P, 1, M)


def step(slowness: float = 1.0, message: float = 0.0):
    """A simulated step; a forward takes 1, a backward 2, and on stage 1 ``slowness`` times that."""
    factors = [slowness if stage == 1 else 1.0 for stage in range(P)]
    times = {(stage, kind): time * factors[stage] for stage in range(P) for kind, time in (("F", 1.0), ("B", 2.0))}
    return simulate(PLAN, StageCosts(times, message))


even = step()
print(timeline_picture(even, "even stages", width=90))

# %% [markdown]
# **One slow stage.** Stage 1 takes twice as long. The other ranks wait after every micro-batch, and their gaps repeat
# through the whole step; the slow rank has almost none. The cure is another division of the layers, not another
# schedule.

# %%
SLOW = 2.0
slow = step(SLOW)
print(timeline_picture(slow, "a slow stage", width=90))

# %% [markdown]
# **Slow messages.** Every border takes a third of a forward. Each rank waits at the beginning and at the end, as with a
# deeper pipeline, and between, where a result goes back and forth. Fewer and larger messages, or more micro-batches in
# flight, help.

# %%
far = step(message=1 / 3)
print(timeline_picture(far, "slow messages", width=90))

# %% [markdown]
# Read the idle time of the ranks first. Equal shares mean the schedule or the messages; one rank with less idle
# time than the others is slow; and one rank with more has too few layers.

# %%
shares = [
    [name, *(f"{1 - busy / timeline.makespan:.0%}" for busy in timeline.busy)]
    for name, timeline in (("even stages", even), ("a slow stage", slow), ("slow messages", far))
]
print_table(["idle time", *(f"rank {rank}" for rank in range(P))], shares)

# %% [markdown]
# ## A trace of a run
#
# `--trace-pipeline FOLDER` records the times of the first steps; `megatron-show-schedule --measured FOLDER` draws them.
# Here two ranks train the small model, and a hook makes the second stage sleep in each forward, as a slow GPU or an
# uneven division of layers would:

# %%
SLEEP = 0.02


class SlowStage(Callback):
    """Sleeps before each forward of the last stage."""

    def before_run(self) -> None:
        if self.run.groups.rank == 1:
            for stage in self.run.stages.values():
                stage.register_forward_pre_hook(lambda *_: time.sleep(SLEEP))


def traced(folder: str) -> None:
    """Train five steps of two stages, and write their trace."""
    layout = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1, "trace_pipeline": folder}
    lengths = {"train_iters": 5, "lr_warmup_iters": 0, "eval_iters": 0}
    with redirect_stdout(StringIO()):
        train(start(**layout, **lengths), [], [SlowStage()])


with tempfile.TemporaryDirectory() as folder:
    run_ranks(2, traced, folder)
    trace = read_trace(folder)
measured = trace.timelines[trace.typical]
print(timeline_picture(measured, "measured (ms)", width=90))

# %% [markdown]
# The numbers are of the machine that made this page. The idle times and the mean times of the actions name the rank:

# %%
costs = measured_costs(measured)
rows = [
    [f"rank {rank}", f"{1 - busy / measured.makespan:.0%}", *(f"{costs.times[rank, kind]:.1f} ms" for kind in "FB")]
    for rank, busy in enumerate(measured.busy)
]
print_table(["", "idle", "forward", "backward"], rows)

# %% [markdown]
# Two more comparisons help. The same plan, simulated with the measured times, shows the step without waiting for late
# messages or other programs; the difference is what the schedule cannot explain:

# %%
print(timeline_picture(simulate(measured.plan, costs), "the plan with these times (ms)", width=90))

# %% [markdown]
# And the same trace of the run without the slow stage shows what is left. For the parts of an action (products,
# attention, collectives) use `--profile`, whose file opens in Perfetto; `megatron-diagnose` reads the records of a run
# and names the bottleneck itself ([Monitoring](../monitoring.md)).
#
# ## Experiment
#
# Change `SLEEP = 0.02` to `SLEEP = 0.0`. Which rank is idle now, and why is it not zero for both? Predict it with the
# formula of chapter 6.
