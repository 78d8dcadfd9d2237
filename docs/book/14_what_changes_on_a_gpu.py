"""Chapter 14 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 14. What changes on a GPU
#
# Nothing in this book has run on a GPU, and neither has this project. The layouts, the messages and the numbers of the
# chapters before do not depend on the device; speed does. Two tools show a part of that on a laptop: the planner, which
# knows the rates of GPUs from data sheets and published steps, and a simulated GPU, which computes on the CPU but
# refuses and counts what a GPU would. Both are models. Measure on a real GPU with `make gpu` before you rely on them.
#
# ## Products are fast, memory is not
#
# A GPU has far more arithmetic than memory bandwidth. Their ratio is the number of operations that each byte has to be
# worth:

# %%
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from small_runs import SMALL, print_table

from megatron_core.config import RunConfig
from megatron_core.planner.hardware import read_hardware
from megatron_core.planner.layer_time import LayerClock

HIDDEN = 4096
TOKENS = 8192
config = RunConfig.from_flat(SMALL | {"bf16": True, "fp64": False})
rows = []
for name in ("a100", "h100", "b200"):
    machine = read_hardware(name)
    rate = machine.flops("bfloat16")
    rows.append(
        [name, f"{rate / 1e12:.0f}", f"{machine.memory_bandwidth / 1e9:.0f}", f"{rate / machine.memory_bandwidth:.0f}"]
    )
print_table(["machine", "TFLOP/s", "GB/s", "operations for a byte"], rows)

# %% [markdown]
# These are rates of large operations in real steps, not those of the data sheets. A product of {{ TOKENS }} tokens by a
# square matrix does 2 h operations for each number of the result; adding two tensors does one, and moves three numbers.
# On one H100:

# %%
h100 = LayerClock(config, read_hardware("h100"), 1, 256)
rows = []
for hidden in (64, 512, HIDDEN):
    product, addition = h100.product(TOKENS, hidden, hidden), h100.elements(3 * 2 * TOKENS * hidden)
    share = 2 * TOKENS * hidden**2 / product / h100.rate
    rows.append(
        [hidden, f"{1e6 * product:.1f} us", f"{share:.0%}", f"{1e6 * addition:.1f} us", f"{addition / product:.2f}"]
    )
print_table(["width", "product", "of the rate", "addition", "addition / product"], rows)

# %% [markdown]
# Up to a width of 512 the addition takes longer than the product, although it has h times fewer operations; at
# {{ HIDDEN }} it still takes a third of it or less. So norms, activations and residual sums are worth their own kernels
# on a GPU, each of which reads and writes its tensors once; [Kernels](../kernels.md) lists them.
#
# ## The host launches, the GPU computes later
#
# Python does not compute on a GPU: it puts kernels into a queue and continues. Each kernel takes at least a launch, of
# microseconds; if the kernels are shorter than that, the GPU waits. The simulated GPU of the tests counts launches;
# PyTorch's operators are counted as one each, although some launch several. One training step of this book's small
# model, in bfloat16:

# %%
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify import run_ranks
from tests.simulated_gpu.runtime import simulated_gpu


def on_simulated_gpu(layers: int) -> tuple[int, list[str]]:
    """Launches of the third step, and the lines at which the host waits in it."""
    settings = SMALL | {"fp64": False, "bf16": True, "num_layers": layers, "global_batch_size": 2}
    with simulated_gpu() as log, redirect_stdout(StringIO()):
        run = set_up(RunConfig.from_flat(settings), World(0, 1, local_rank=0, device=torch.device("cuda", 0)))
        for _ in range(3):  # the first steps allocate memory
            log.launches.clear()
            log.stalls.clear()
            train_step(run)
        waits = [f"{line}, {count} times" if count > 1 else line for line, count in log.stalls.items()]
        return sum(log.launches.values()), waits


launches = {layers: run_ranks(1, on_simulated_gpu, layers)[0][0] for layers in (2, 4)}
each = (launches[4] - launches[2]) // 2
queue = each * h100.hardware.launch_seconds
print(f"{launches[4]} launches with 4 layers, {each} for each layer: {1e6 * queue:.0f} us of launches for a layer")

# %% [markdown]
# The CUDA kernels of this project were not used here: each of them replaces several operators. A layer whose products
# take much longer than these {{ "%.0f" | format(1e6 * queue) }} us hides the launches; the small model does not. A test
# on a small model therefore says nothing about speed on a GPU. [CUDA graphs](../graphs.md) record the launches of a
# layer once, and replay them as one.
#
# ## Where the host waits
#
# `loss.item()` needs the value: the host waits until the queue is empty, and the GPU then waits for the next launch.
# The simulated GPU lists such lines. In a whole training step this file alone has one:

# %%
waits = run_ranks(1, on_simulated_gpu, 4)[0][1]
for line in waits:
    print(line.split(":")[0].replace("megatron_core/", ""))

# %% [markdown]
# Errors that only a GPU reports are reproduced, too: here an operation over both devices.

# %%


def mixes_devices() -> str:
    """The error of an addition of tensors on two devices."""
    with simulated_gpu():
        try:
            torch.ones(2, device="cuda") + torch.ones(2)
        except RuntimeError as error:
            return str(error)
    return "no error"


print(run_ranks(1, mixes_devices)[0])

# %% [markdown]
# ## What remains unknown
#
# | | shown here | needs a GPU |
# |---|---|---|
# | numbers of every layout | in float64, on CPUs | in bfloat16, with the kernels of the GPU |
# | time of a step | planned | measured |
# | overlap of messages and products | the order of calls | that both run at the same time |
# | memory | tensors, by formula | fragments, workspaces of libraries |
# | errors of mixed devices and early reads | simulated | the real ones |
#
# ## Experiment
#
# Change `HIDDEN = 4096` to `HIDDEN = 8192`. What happens to the share of the product's rate, and to the ratio of
# addition to product? Which of both falls forever?
