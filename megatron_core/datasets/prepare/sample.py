"""Some texts from all over the input, to compare tokenizers on."""

from collections.abc import Sequence
from pathlib import Path

from megatron_core.datasets.prepare.documents import Limits
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.readers import open_reader
from megatron_core.datasets.prepare.settings import PrepareSettings

PLACES = 16
PLACE_CHARACTERS = 1024
# What is read at each place; the texts are only begun.
PLACE_BYTES = 1 << 14


def sample_texts(settings: PrepareSettings, sources: Sequence[Source], folder: Path) -> list[str]:
    """The beginnings of texts at 16 places spread over the files, 16 thousand characters together."""
    filled = [source for source in sources if source.size]
    total = sum(source.size for source in filled)
    limits = Limits(batch_bytes=PLACE_BYTES)
    texts: list[str] = []
    starts = [total * place // PLACES for place in range(PLACES)]
    before = 0
    for source in filled:
        inside = [start - before for start in starts if before <= start < before + source.size]
        before += source.size
        if inside:
            texts += _texts_at(settings, source, inside, limits, folder)
    return texts


def _texts_at(
    settings: PrepareSettings, source: Source, places: Sequence[int], limits: Limits, folder: Path
) -> list[str]:
    """Texts at byte places of a file; all from its beginning if it can only be read from there."""
    reader = open_reader(source, settings.json_keys, settings.separator, limits, folder)
    anywhere = source.kind == "jsonl" and source.compression is None
    texts: list[str] = []
    for start, stop in [(place, place + PLACE_BYTES) for place in places] if anywhere else [(0, None)]:
        wanted = PLACE_CHARACTERS if anywhere else PLACE_CHARACTERS * len(places)
        for batch in reader.read(start, stop):
            for row in zip(*batch.texts, strict=True):
                for text in row:
                    if wanted > 0:
                        texts.append(text[:wanted])
                        wanted -= len(text)
            if wanted <= 0:
                break
    reader.close()
    return texts
