"""State of compressors in checkpoints: errors of each data-parallel rank, factors, and rows of parameters."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_core.checkpoint import Box, TensorBox, pieces_of
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.data_parallel.compressor import Compressor
from megatron_core.parallel.grid import DENSE_AXES, EXPERT_AXES
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import gather_from_all_ranks


class StoredCompressor(Compressor):
    """A compressor whose state is stored in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[Bucket, Any] = {}
        """New state, which ``commit`` stores."""

    def discard(self) -> None:
        """See ``Compressor.discard``."""
        self._pending.clear()

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield a bucket's state for checkpoints: name, tensor, and whether the tensor differs between data-parallel
        ranks.
        """
        raise NotImplementedError

    def state_of_parameters(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yield state for checkpoints with a row for each of the bucket's parameters: name, and tensor ``[parameters,
        n]``, which all ranks with a part of a parameter have."""
        yield from ()

    def forget(self) -> None:
        """Drop everything that was derived from the optimizer's state, which has been loaded from a checkpoint."""
        self.discard()

    def pieces(self, data: DataParallel) -> Iterator[TensorBox]:
        """See ``Compressor.pieces``."""
        for bucket in data.buckets:
            yield from self._pieces_of(bucket, data)
        yield from self._rows(data)

    def _pieces_of(self, bucket: Bucket, data: DataParallel) -> Iterator[TensorBox]:
        rank = bucket.dp_group.rank()
        size = bucket.dp_group.size()
        axes = bucket.kind.replica_axes
        for state_name, tensor, is_local in self.state(bucket):
            if is_local:
                length = bucket.weights.numel() // size
                is_full = tensor.numel() == bucket.weights.numel()
                span = slice(0, tensor.numel()) if is_full else slice(rank * length, (rank + 1) * length)
                # Each rank has errors of its own; its number in the name keeps them apart.
                label = f"compression.{state_name}.{rank}" if is_full else f"compression.{state_name}"
                for name, parameter, start, stop, offset in bucket.pieces(span):
                    local = tuple(parameter.shape)
                    flat = tensor[offset : offset + stop - start]
                    yield from pieces_of(f"{label}.{name}", spec_of(parameter), local, start, stop, flat)
            else:
                view = EXPERT_AXES if "edp" in axes else DENSE_AXES
                holder = ".".join(str(data.groups.index(axis)) for axis in view if axis not in (*axes, "pp"))
                name = f"compression.{state_name}.{holder}.{bucket.names[0]}"
                shape = tuple(tensor.shape)
                # The last stage's copy of tied weights has equal factors: gradients are summed before compression.
                owned = rank == 0 and not spec_of(bucket.parameters[0]).is_copy
                yield TensorBox(name, shape, Box((0,) * len(shape), shape), tensor, owned)

    def _rows(self, data: DataParallel) -> Iterator[TensorBox]:
        for bucket in data.buckets:
            for state_name, rows in self.state_of_parameters(bucket):
                for row, name, parameter in zip(rows, bucket.names, bucket.parameters, strict=True):
                    parts = spec_of(parameter).parts
                    has_first = any(indices.owned and not any(indices.whole.start) for indices in parts)
                    owned = bucket.dp_group.rank() == 0 and has_first
                    shape = tuple(row.shape)
                    yield TensorBox(f"compression.{state_name}.{name}", shape, Box((0,), shape), row, owned)

    def pieces_to_load(self, reader: StateReader, data: DataParallel) -> list[TensorBox]:
        """The pieces of the state that can be loaded.

        Errors belong to data-parallel ranks: with another number of ranks they stay zero, and a note is printed. If the
        layout or the shape of factors differs, factors are initialized again on all ranks, because copies must be
        equal."""
        self.forget()
        coefficients = list(self._rows(data))
        pieces = [piece for bucket in data.buckets for piece in self._pieces_of(bucket, data)]
        factors = [piece for piece in pieces if piece.name.startswith("compression.factor")]
        errors = [piece for piece in pieces if not piece.name.startswith("compression.factor")]
        ranks = reader.state.get("compression_ranks")
        has_errors = ranks == data.groups.size("dp") and all(reader.has(piece.name) for piece in errors)
        has_factors = all(reader.has(piece.name, piece.global_shape) for piece in factors)
        by_rank = gather_from_all_ranks(f"{has_errors:d}{has_factors:d}", data.device)
        if any(text[0] == "0" for text in by_rank):
            note(f"the compression errors of gradients start at zero: the checkpoint has those of {ranks or 0} ranks")
            return coefficients
        return [*coefficients, *errors, *(factors if all(text[1] == "1" for text in by_rank) else ())]
