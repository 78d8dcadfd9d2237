"""FP8 in a training run: scales across steps, their state in checkpoints, and statistics."""

from collections.abc import Iterable, Iterator
from itertools import chain

from megatron_core.checkpoint import TensorBox
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.features.fp8.amax_history import AmaxHistories
from megatron_core.features.fp8.arithmetic import fp8_of
from megatron_core.features.fp8.rules import block_size
from megatron_core.features.fp8.scaled_product import scaled_product_unavailable_reason
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.texts import gather_strings
from megatron_core.training.callbacks import Callback, is_due
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class FP8Part(RunPart):
    """The amax histories of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        group = run.groups.group("tp-dp-cp")
        settings = run.config.section(FP8Config)
        self.histories = AmaxHistories(run.stages.values(), settings, group, run.world.device)
        # The weights of a unit of data parallelism arrive together, so that the first use may read all.
        units = (unit for stage in run.stages.values() for unit in stage.units())
        for unit in units if settings.fp8_recipe == "tensorwise" else ():
            linears = {fp8_of(linear): linear for module in unit for linear in module.modules()}
            for products in filter(None, linears):
                products.unit = {of: linear for of, linear in linears.items() if of and not of.by_row}

    def notes(self) -> Iterator[str]:
        """Reasons for which FP8 is slow or pointless here."""
        settings = self.run.config.section(FP8Config)
        if reason := scaled_product_unavailable_reason(block_size(settings), self.run.world.device):
            yield (
                f"fp8_recipe={settings.fp8_recipe} multiplies dequantised matrices, no faster than without FP8: "
                f"{reason}"
            )
        if settings.fp64:
            yield (
                f"fp8_format={settings.fp8_format} rounds the matrices of linear layers to FP8, although fp64=True "
                "computes everything else in float64; use both only to compare layouts, and otherwise remove one of "
                "them"
            )

    def before_step(self) -> None:
        """Quantise each weight once in the step."""
        # ZeRO stage 3 frees a weight after its layer; both orders in FP8 would hold the bytes of a weight in 16 bits.
        self.histories.begin_step(keeps_weights=self.run.config.parallel.dp_zero_stage < 3)

    def after_gradients(self) -> None:
        """Add the step to the histories, before the update, which may gather weights with the new scales."""
        self.histories.update()

    def stored_pieces(
        self, updated: Iterable[TensorBox], copied: Iterable[TensorBox], *, weights_only: bool
    ) -> tuple[Iterable[TensorBox], Iterable[TensorBox]]:
        """Add the histories."""
        return updated, copied if weights_only else self.copied_pieces(copied)

    def copied_pieces(self, pieces: Iterable[TensorBox]) -> Iterable[TensorBox]:
        """Add the histories."""
        return chain(pieces, self.histories.pieces())

    def pieces_to_load(self, reader: StateReader) -> Iterable[TensorBox]:
        """The histories, as far as the checkpoint has them."""
        return self.histories.pieces_to_load(reader)


class FP8Statistics(Callback):
    """Prints the shares of elements that FP8 clamps or rounds to 0, every ``fp8_statistics_interval`` steps."""

    priority = 500

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        fp8 = run.part(FP8Part)
        assert fp8 is not None, "the feature has a part and callbacks"
        self._histories = fp8.histories
        self._interval = run.config.section(FP8Config).fp8_statistics_interval

    def before_step(self) -> None:
        """Count the elements in this step if its statistics are due."""
        self._histories.count(wanted=is_due(self.run.state.iteration + 1, self._interval))

    def after_step(self, result: StepResult) -> None:
        """Print the statistics if they are due."""
        if is_due(self.run.state.iteration, self._interval):
            self.print()

    def print(self) -> None:
        """Print the shares by layer, over all ranks; all ranks call this together."""
        run = self.run
        lines = [
            f"  {loss.layer} {loss.role}: {loss.saturated:.4%}, {loss.underflown:.4%}"
            for loss in self._histories.losses()
        ]
        stages = gather_strings("\n".join(lines), run.groups.group("pp"), run.world.device)
        if run.world.rank == 0:
            print(f"fp8 at iteration {run.state.iteration}: elements clamped, and elements that became 0")
            print("\n".join(text for text in stages if text), flush=True)
