"""How often Megatron's order goes through the documents, and their order."""

from dataclasses import dataclass

import numpy as np

from megatron_core.errors import DataError

# A last epoch of which less than this share is needed is shuffled by itself, so that its samples come last.
SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class Epochs:
    """How often the documents are gone through; `samples_before_last` is None where all epochs are shuffled as one."""

    count: int
    samples_before_last: int | None


def plan_epochs(num_tokens: int, sequence_length: int, num_samples: int | None, extra_tokens: int = 1) -> Epochs:
    """The fewest epochs of T tokens that give N samples of L tokens, and whether the last of them stands alone.

    E is the smallest with E T >= N L + x. With E > 1, the last epoch gives N - floor(((E - 1) T - x) / L) samples;
    it is shuffled by itself if that is below int(0.8 floor((T - x) / L)). `num_samples` None stands for one epoch.
    DataError: no tokens.
    """
    if num_tokens < 1:
        raise DataError(f"the documents hold no tokens, and samples of {sequence_length} were asked for")
    if num_samples is None:
        return Epochs(1, None)
    count = max(1, -(-(num_samples * sequence_length + extra_tokens) // num_tokens))
    if count == 1:
        return Epochs(1, None)
    before = ((count - 1) * num_tokens - extra_tokens) // sequence_length
    per_epoch = (num_tokens - extra_tokens) // sequence_length
    separate = num_samples - before < int(SEPARATE_BELOW * per_epoch)
    return Epochs(count, before if separate else None)


def build_document_index(
    documents: np.ndarray, epochs: int, state: np.random.RandomState, separate_last: bool
) -> np.ndarray:
    """The documents, once for each epoch, shuffled: int32 [epochs * len(documents)].

    All epochs are shuffled as one, or with `separate_last` the last one after and apart from those before it. The
    numbers that are drawn from `state`, and their order, are Megatron-LM's.
    """
    parts = (epochs - 1, 1) if separate_last and epochs > 1 else (epochs,)
    index = np.tile(np.asarray(documents, dtype=np.int32), epochs)
    stop = 0
    for part in parts:
        start, stop = stop, stop + part * len(documents)
        state.shuffle(index[start:stop])
    return index
