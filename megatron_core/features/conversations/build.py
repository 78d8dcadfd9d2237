"""Builds data sets of conversations from the data flags."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_core.config import RunConfig
from megatron_core.datasets.blend import parse_blend
from megatron_core.datasets.build import Splits, divide_files
from megatron_core.datasets.paths import Phase, read_paths, split_ranges
from megatron_core.datasets.sources import FileContent, file_hash
from megatron_core.errors import ConfigError
from megatron_core.features.conversations.chat_template import chat_template_of
from megatron_core.features.conversations.dataset import ConversationDataset, ConversationFile
from megatron_core.features.conversations.encoder import ConversationTokenizer
from megatron_core.features.conversations.settings import ConversationConfig
from megatron_core.tokenizers import Tokenizer
from megatron_core.training.data import DataPart, DataRequest


class ConversationData(DataPart):
    """The data sets of ``--sft``: the lines of ``data_path`` divided by ``split``, or files per split."""

    setting = "sft"
    """The setting that chooses this kind of data."""
    file_type: type[ConversationFile] = ConversationFile
    dataset_type: type[ConversationDataset] = ConversationDataset

    def build(self, request: DataRequest) -> Splits:
        """See ``DataPart.build``."""
        config = request.config
        data = config.data
        settings = config.section(ConversationConfig)
        encoder = self._encoder(config, request.tokenizer)
        packs = settings.sft_packing == "first_fit"
        seed = config.training.seed

        def dataset(files: Sequence[ConversationFile], lines: Sequence[int]) -> ConversationDataset | None:
            return self.dataset_type(files, lines, encoder, data.seq_length, seed, packs=packs) if len(lines) else None

        def whole(paths: Sequence[str], name: str) -> ConversationDataset | None:
            files = self._files(paths)
            return dataset(files, range(sum(map(len, files))))

        def divided(phase: Phase, fractions: Sequence[float]) -> list[ConversationDataset | None]:
            files = self._files(phase.data_path)
            return [dataset(files, lines) for lines in split_ranges(fractions, sum(map(len, files)))]

        splits = divide_files(data, read_paths(data), whole, divided)
        notes = splits.train.describe() if isinstance(splits.train, ConversationDataset) else ()
        if encoder.template.reads_date:
            date = settings.chat_template_date
            notes = (*notes, f"the chat template writes a date: {date} in every run (--chat-template-date)")
        return replace(splits, notes=notes)

    @staticmethod
    def file_content(path: str) -> FileContent:
        """The number of lines and the hash of a file of conversations."""
        with open(path, "rb") as file:
            lines = sum(1 for line in file if line.strip())
        return lines, 0, 0, "", file_hash(Path(path))

    def _encoder(self, config: RunConfig, tokenizer: Tokenizer | None) -> ConversationTokenizer:
        settings = config.section(ConversationConfig)
        template = None
        if tokenizer is not None:
            template = chat_template_of(tokenizer, config.data.chat_template, date=settings.chat_template_date)
        if tokenizer is None or template is None:
            raise ConfigError(
                f"{self.setting}=True needs a chat template, which writes all kinds of lines as text, also questions "
                "and answers with Alpaca's keys. Many tokenizers of Hugging Face have one: give their folder as "
                "--tokenizer-model. For a base model give --chat-template alpaca, or a file with a template"
            )
        last_only = settings.sft_loss == "last_answer"
        return ConversationTokenizer(tokenizer, template, last_only=last_only)

    def _files(self, paths: Sequence[str]) -> list[ConversationFile]:
        if not paths:
            return []
        weights, files = parse_blend(paths)
        if weights is not None and len(files) > 1:
            raise ConfigError(f"{' '.join(paths)}: --{self.setting} reads each line once per round; remove the weights")
        return [self.file_type(path) for path in files]
