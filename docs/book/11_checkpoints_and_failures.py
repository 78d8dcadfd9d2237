"""Chapter 11 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 11. Checkpoints and failures
#
# A job on thousands of GPUs fails every few hours. What a failure costs is the time since the last checkpoint, and the
# time to start again, perhaps with fewer ranks and so in another layout.
#
# ## A checkpoint does not know the layout
#
# Each rank has a part of each tensor. If a checkpoint stored the ranks' parts as such, only the same layout could read
# it. Here each part is stored as a *box* of the whole tensor, with its name, and a rank reads the boxes that overlap
# its own. We train two steps with tensor parallelism, save, and resume as a pipeline:

# %%
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from small_runs import COLOURS, new_figure, print_table, save, start, train

from megatron_core.training.step import train_step
from megatron_core.verify import run_ranks

FOLDER = tempfile.TemporaryDirectory()
CHECKPOINTS = Path(FOLDER.name) / "checkpoints"


def steps(count: int, settings: dict, saves: bool = False) -> list[float]:
    """Losses of the next steps; afterwards the run is saved on request."""
    with redirect_stdout(StringIO()):
        run = start(**settings)
        losses = [train_step(run).loss for _ in range(count)]
        if saves:
            run.data_parallel.finish_param_sync()
            run.saver.save(run.state)
            run.saver.finish()
    return losses


FIRST = {"tensor_model_parallel_size": 2, "save": str(CHECKPOINTS)}
SECOND = {"pipeline_model_parallel_size": 2, "load": str(CHECKPOINTS)}
whole = run_ranks(1, steps, 4, {})[0]
before = run_ranks(2, steps, 2, FIRST, True)[0]
after = run_ranks(2, steps, 2, SECOND)[0]
names = ["tp2"] * len(before) + ["pp2"] * len(after)
print_table(
    ["step", "one process", "layout", "loss"],
    [
        [n, f"{a:.6f}", name, f"{b:.6f}"]
        for n, (a, name, b) in enumerate(zip(whole, names, before + after, strict=True), 1)
    ],
)
assert all(abs(a - b) < 1e-9 for a, b in zip(whole, before + after, strict=True))

# %% [markdown]
# Weights, both moments, the learning rate and the position in the data must be restored. If one is missing, the loss of
# the *next* step is still right, because it depends only on the weights: compare at least two steps. The folder has a
# file for each rank, and a manifest, with a hash of each file:

# %%
for path in sorted(CHECKPOINTS.glob("iter_*/rank_*")):
    print(f"{path.relative_to(CHECKPOINTS)}: {path.stat().st_size:,} bytes")

# %% [markdown]
# ## Damage
#
# Files are damaged by full disks, killed writers and flipped bits. Training can continue with a flipped bit in a
# weight, without an error. We save once more, and flip a bit of the newer checkpoint:

# %%
run_ranks(2, steps, 1, FIRST | {"load": str(CHECKPOINTS)}, True)
(file,) = CHECKPOINTS.glob("iter_0000003/rank_00001*")
content = bytearray(file.read_bytes())
content[-100] ^= 1
file.write_bytes(content)


def resumed() -> int:
    """The iteration from which a run would resume."""
    return start(load=str(CHECKPOINTS)).state.iteration


with redirect_stdout(StringIO()):
    (iteration,) = run_ranks(1, resumed)
print(f"resumes from iteration {iteration}")

# %% [markdown]
# The hash reveals the damage, and the run resumes from the checkpoint before. Files are written under a hidden name,
# flushed, and renamed when the manifest is complete. So a rank may be killed at any time; a checkpoint that has its
# name is complete.
#
# ## How often?
#
# Saving more often costs time C for each save; saving less often costs half of the interval at each failure. With a
# mean time M between failures the least is lost at an interval of the square root of 2 C M (Young 1974). The Llama 3
# report (section 3.3.4) counts 419 unexpected interruptions in 54 days on 16,384 GPUs:

# %%
import random
from math import sqrt

HOURS = 54 * 24 / 419
SAVE = 60.0
mean = HOURS * 3600
best = sqrt(2 * SAVE * mean)
print(f"a failure every {HOURS:.1f} hours; with saves of {SAVE:g} s the best interval is {best / 60:.0f} minutes")


def lost(interval: float, failures: int = 20_000) -> float:
    """Share of the time that saves and repeated steps take, in a simulation."""
    generator, useful, total = random.Random(1), 0.0, 0.0
    for _ in range(failures):
        time = generator.expovariate(1 / mean)
        total += time
        useful += time // (interval + SAVE) * interval
    return 1 - useful / total


intervals = [300 * 2 ** (power / 2) for power in range(10)]
figure, axes = new_figure("minutes between saves", "lost time (%)")
minutes = [interval / 60 for interval in intervals]
axes.plot(minutes, [100 * lost(interval) for interval in intervals], color=COLOURS[0], marker="o", label="simulated")
formula = [100 * (SAVE / interval + interval / 2 / mean) for interval in intervals]
axes.plot(minutes, formula, color=COLOURS[1], linestyle="dashed", label="Young's formula")
axes.axvline(best / 60, color="grey", linestyle="dotted")
axes.set_xscale("log", base=2)
axes.set_xticks([5, 10, 20, 40, 80], ["5", "10", "20", "40", "80"])
save(figure, "lost_time", "time lost by saves and by repeated steps")
print(f"lost: {lost(best):.1%} at this interval, {lost(4 * best):.1%} at four times, {lost(best / 4):.1%} at a quarter")

# %% [markdown]
# The minimum is flat, but its value is not small. So saves must be cheap: a copy to memory is short, and the rest
# is written while training continues (`--async-save`); copies in the memory of other hosts make restarts fast
# ([checkpoints.md](../checkpoints.md)). And failures must be noticed: a rank that hangs stops all others without any
# message ([resilience.md](../resilience.md)).
#
# ## Experiment
#
# A save in the background delays training only by a copy to memory. Change `SAVE = 60.0` to `SAVE = 2.0`. How does the
# best interval change, how the time that is lost?
