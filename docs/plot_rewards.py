"""Plot the rewards that ``examples/grpo.py`` has printed: ``python docs/plot_rewards.py LINES.jsonl PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

WINDOW = 25


def main(lines: Path, picture: Path) -> None:
    """Draw the reward of each step, and its mean over ``WINDOW`` steps."""
    values = [json.loads(line) for line in lines.read_text().splitlines()]
    steps = np.array([value["step"] for value in values])
    rewards = np.array([value["reward"] for value in values])
    means = np.convolve(rewards, np.ones(WINDOW) / WINDOW, mode="valid")
    figure = Figure(figsize=(7.0, 3.0), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#56b4e9", linewidth=0.5, label="one step")
    axes.plot(steps[WINDOW - 1 :], means, color="#0072b2", label=f"mean of {WINDOW} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("share of right answers")
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
