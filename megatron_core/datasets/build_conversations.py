"""Builds the data sets of conversations and of preferences from the data flags."""

from collections.abc import Sequence

from megatron_core.config import DataConfig
from megatron_core.datasets.blend import parse_blend
from megatron_core.datasets.build import Splits
from megatron_core.datasets.conversation_tokenizer import ConversationTokenizer
from megatron_core.datasets.conversations import ConversationDataset, ConversationFile
from megatron_core.datasets.paths import DEFAULT_SPLIT, named_paths, parse_split, read_paths, split_ranges
from megatron_core.datasets.preferences import PreferenceDataset, PreferenceFile
from megatron_core.errors import ConfigError
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.chat import ChatTemplate, chat_template_of


def build_conversations(data: DataConfig, *, seed: int, tokenizer: Tokenizer | None) -> Splits:
    """The data sets of ``--sft`` or ``--dpo``: the lines of ``data_path`` divided by ``split``, or files per split."""
    template = (
        None if tokenizer is None else chat_template_of(tokenizer, data.chat_template, date=data.chat_template_date)
    )
    if tokenizer is None or template is None:
        raise ConfigError(
            f"{'dpo' if data.dpo else 'sft'}=True needs a chat template, which writes all kinds of lines as text, also "
            "questions and answers with Alpaca's keys. Many tokenizers of Hugging Face have one: give their folder as "
            "--tokenizer-model. For a base model give --chat-template alpaca, or a file with a template"
        )
    encoder = ConversationTokenizer(tokenizer, template, last_only=data.sft_loss == "last_answer", to_end=data.dpo)
    paths, packs = read_paths(data), data.sft_packing == "first_fit"
    kind = PreferenceDataset if data.dpo else ConversationDataset

    def dataset(files: Sequence[ConversationFile], lines: Sequence[int]) -> ConversationDataset | None:
        return kind(files, lines, encoder, data.seq_length, seed, packs=packs) if len(lines) else None

    if paths.phases:
        files = _files(paths.phases[-1].data_path, data)
        ranges = split_ranges(parse_split(data.split or DEFAULT_SPLIT), sum(map(len, files)))
        train, valid, test = (dataset(files, lines) for lines in ranges)
        return Splits(train, valid, test, _notes(train, template, data))
    named = {name: _files([path], data) for name, path in named_paths(data, paths).items()}
    own = [_files(each, data) for each in (paths.own[0], () if named else paths.own[1], paths.own[2])]
    train, valid, test = (dataset(files, range(sum(map(len, files)))) for files in own)
    sets = {name: dataset(files, range(sum(map(len, files)))) for name, files in named.items()}
    named_sets = {name: own for name, own in sets.items() if own is not None}
    return Splits(train, valid, test, _notes(train, template, data), named=named_sets)


def _notes(train: ConversationDataset | None, template: ChatTemplate, data: DataConfig) -> tuple[str, ...]:
    found = () if train is None else train.describe()
    if not template.reads_date:
        return found
    return (*found, f"the chat template writes a date: {data.chat_template_date} in every run (--chat-template-date)")


def _files(paths: Sequence[str], data: DataConfig) -> list[ConversationFile]:
    if not paths:
        return []
    weights, files = parse_blend(paths)
    if weights is not None and len(files) > 1:
        flag = "--dpo" if data.dpo else "--sft"
        raise ConfigError(f"{' '.join(paths)}: {flag} reads each line once per round; remove the weights")
    return [(PreferenceFile if data.dpo else ConversationFile)(path) for path in files]
