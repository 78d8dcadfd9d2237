"""The explicit layout of layers on pipeline stages."""

from collections.abc import Sequence

from megatron.core.enums import LayerType
from megatron_core.errors import LayoutError
from megatron_core.features.stage_layouts.spellings import LETTERS, parse_layout
from megatron_core.parallel_state import get_pipeline_model_parallel_rank

_TYPES = {"E": LayerType.embedding, "t": LayerType.decoder, "L": LayerType.loss, "m": LayerType.mtp}


class PipelineParallelLayerLayout:
    """The layers of each stage: ``layout[pp_rank][vp_stage]`` is a list of ``LayerType``.

    The input is a string (``"Ett|(tt|)*2L"``) or a list of stages in order, each a list of types or their names; stage
    i is chunk i // p of pipeline rank i % p.
    """

    def __init__(self, layout: str | Sequence[Sequence[LayerType | str]], pipeline_model_parallel_size: int) -> None:
        self.input_data = layout
        stages = self.parse_str_to_list(layout) if isinstance(layout, str) else [_types(stage) for stage in layout]
        size = pipeline_model_parallel_size
        if not stages or size < 1 or len(stages) % size:
            raise LayoutError(
                f"a layout of {len(stages)} stages cannot be split over pipeline_model_parallel_size={size}; "
                "give a multiple of it"
            )
        self.pipeline_model_parallel_size = size
        self.virtual_pipeline_model_parallel_size = len(stages) // size
        self.layout = [stages[rank::size] for rank in range(size)]
        self.flatten_layout = [layer for stage in stages for layer in stage]

    def __repr__(self) -> str:
        return str(self.input_data)

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """Return the stages of a string, in order."""
        return [[_TYPES[letter] for letter in stage] for stage in parse_layout(layout_str)]

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Return pipeline ranks x chunks of a string."""
        return len(parse_layout(layout))

    @classmethod
    def from_str(cls, layout: str, pipeline_model_parallel_size: int) -> "PipelineParallelLayerLayout":
        """Return the layout of a string."""
        return cls(layout, pipeline_model_parallel_size)

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None = None) -> None:
        """Raise ``LayoutError`` unless one embedding comes first, one loss last, and the numbers of layers match."""
        flat, found = self.flatten_layout, []
        for layer, index, end in ((LayerType.embedding, 0, "first"), (LayerType.loss, -1, "last")):
            if flat.count(layer) != 1 or flat[index] is not layer:
                found.append(f"its {end} layer must be its only {layer.name}, but it has {flat.count(layer)}")
        wanted = {LayerType.decoder: num_layers, LayerType.mtp: mtp_num_layers or 0, LayerType.encoder: 0}
        for layer, count in wanted.items():
            if flat.count(layer) != count:
                found.append(f"it has {flat.count(layer)} {layer.name} layers, not {count}")
        if found:
            raise LayoutError(f"the pipeline layout {self} cannot be used: {'; '.join(found)}. Change the layout")

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a type on a stage; ``pp_rank`` defaults to this process."""
        rank, chunk = self._place(vp_stage, pp_rank)
        return self.layout[rank][chunk].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a type on all stages before a stage."""
        rank, chunk = self._place(vp_stage, pp_rank)
        size = self.pipeline_model_parallel_size
        before = (self.layout[stage % size][stage // size] for stage in range(chunk * size + rank))
        return sum(stage.count(layer_type) for stage in before)

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """Return the global numbers, from 0, of a stage's layers of a type."""
        first = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(first, first + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def _place(self, vp_stage: int | None, pp_rank: int | None) -> tuple[int, int]:
        if vp_stage is None and self.virtual_pipeline_model_parallel_size > 1:
            raise LayoutError(
                f"vp_stage=None, but each rank has {self.virtual_pipeline_model_parallel_size} chunks; pass one"
            )
        rank = get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return rank, vp_stage or 0


def _types(stage: Sequence[LayerType | str]) -> list[LayerType]:
    """Return the layers of a stage as types."""
    if isinstance(stage, str):
        raise LayoutError(f"the stage {stage!r} is a string; pass the layout as one string, or a list for each stage")
    known = LayerType.__members__
    for layer in stage:
        if not isinstance(layer, LayerType) and str(layer).strip().lower() not in known:
            raise LayoutError(
                f"{layer!r} is not a type of layer; legal: {', '.join(known)} (in a string {', '.join(LETTERS)})"
            )
    return [layer if isinstance(layer, LayerType) else known[layer.strip().lower()] for layer in stage]
