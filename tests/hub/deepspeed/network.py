"""The network, the data and the optimizer of the checkpoints in ``checkpoints/``; it needs torch only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, STEPS_BEFORE, STEPS_AFTER = 4, 3, 5
LLAMA = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False},
}
"""Settings of the transformers model of the checkpoint with tensor parallelism."""


class Network(nn.Module):
    """A network with sizes that do not divide, a frozen layer, a parameter under two names and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 7, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(7, 1)
        self.register_buffer("shift", torch.zeros(7))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in [*self.parameters(), self.shift]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of the squared errors."""
        hidden = torch.tanh(self.first(inputs) + self.shift.to(inputs.dtype))
        hidden = torch.tanh(self.second(self.frozen(hidden)))
        return (self.last(torch.tanh(self.third(hidden))).float() - targets.float()).square().mean()


def groups(network: Network) -> list[dict[str, object]]:
    """Return two parameter groups with different rates and weight decays."""
    trained = [p for p in network.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "lr": 0.01, "weight_decay": 0.0},
    ]


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(BATCH, 3, generator=generator)
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return inputs[share], inputs[share].sum(dim=1, keepdim=True)


def tokens() -> Tensor:
    """Return the token ids of each step of the transformers model."""
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))
