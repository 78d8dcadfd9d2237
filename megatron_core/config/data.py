"""Training data and the tokenizer."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.growth import Growth, constant
from megatron_core.config.setting import ALWAYS, BY_RULE, Resume, given, section, setting
from megatron_core.feature import Extensible

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True)
class TokenizerKind:
    """A value of `--tokenizer-type`."""

    name: str
    """The value."""
    make: str
    """Hook: a function of the settings ``needs``, then ``takes``, that returns a ``tokenizers.Tokenizer``. Its module
    is imported when the kind is chosen: each loads a library of its own, which takes 0.1 s or more in every process."""
    needs: tuple[str, ...] = ()
    """Required settings."""
    takes: tuple[str, ...] = ()
    """Optional settings."""


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class DataConfig(Extensible):
    """Token files, their split into training, validation and test, and the tokenizer."""

    seq_length: int = setting(64, r.SIZE, when=ALWAYS, resume=Resume.TOKENS, aliases="encoder_seq_length")
    """Tokens in a training sequence."""
    data_path: tuple[str, ...] = setting((), when=BY_RULE)
    """Prefixes of .bin/.idx files or of their URLs (docs/storage.md), or a blend: weight prefix weight prefix ..."""
    data_args_path: str | None = setting(None, when=BY_RULE)
    """Text file with the arguments of --data-path."""
    train_data_path: tuple[str, ...] = setting((), when=BY_RULE)
    """As --data-path, for training only; excludes --data-path and --split."""
    valid_data_path: tuple[str, ...] = setting((), when=c.EVALUATION)
    """As --data-path, for validation only."""
    test_data_path: tuple[str, ...] = setting((), when=c.EVALUATION)
    """As --data-path, for the test split only."""
    multiple_validation_sets: bool = setting(False, when=c.EVALUATION)
    """Evaluate each file of --valid-data-path alone, with a loss of its own."""
    validation_set_names: tuple[str, ...] = setting((), needs=given("multiple_validation_sets"), resume=Resume.FREE)
    """Names of these files in reports; default: their names without folders."""
    full_validation: bool = setting(False, when=c.EVALUATION)
    """Evaluate on all validation and test samples, once, instead of --eval-iters batches; --eval-iters 0 turns this
    off, too."""
    per_split_data_args_path: str | None = setting(None, when=BY_RULE)
    """JSON file with the keys train, valid and test: the arguments of --train-data-path etc."""
    split: str | None = setting(None, when=c.DIVIDED_DATA)
    """Shares of training, validation and test data in --data-path; default: 969,30,1."""
    data_order: Literal["keyed", "megatron"] = setting("keyed", when=c.OWN_DATA)
    """Order of samples. keyed: a function of the seed and the sample number, without index files. megatron:
    Megatron-LM's order for the same seed, so that a run that was started there continues with the same batches,
    also of its mock data."""
    num_dataset_builder_threads: int = setting(1, r.SMALL_COUNT, when=c.TOKEN_FILES, resume=Resume.FREE)
    """Number of threads that open the files of a blend and build their indices."""
    dataloader_type: Literal["single", "cyclic", "external"] = setting("single", when=ALWAYS)
    """single: one pass over all epochs. cyclic: the samples of one epoch, repeated in a new order each time. external:
    datasets that a script passes to megatron_core.training.pretrain."""
    num_workers: int = setting(2, r.SMALL_COUNT_FROM_0, when=ALWAYS, resume=Resume.FREE)
    """Number of threads per rank that prefetch the micro-batches of the next step; 0: no prefetching."""
    chat_template: str | None = setting(None, when=BY_RULE)
    """File with the Jinja chat template for --sft and --dpo; alpaca: headings such as "### Response:", for base models
    without special tokens of chats; default: the template in the tokenizer's folder."""
    mock_data: bool = setting(False, when=ALWAYS)
    """Train on generated sequences instead of files; needs --vocab-size."""
    eod_mask_loss: bool = setting(False, when=c.TOKEN_FILES)
    """Mask the loss where the input token is the end-of-document token."""
    reset_position_ids: bool = setting(False, when=c.POSITIONS)
    """Restart positions at 0 after each end-of-document token."""
    reset_attention_mask: bool = setting(False, when=ALWAYS)
    """Restrict attention to the tokens of the same document. An end-of-document token still predicts the first token of
    the next document, unless --eod-mask-loss is given, too."""
    tokenizer_type: TokenizerType | None = setting(None, when=ALWAYS, resume=Resume.TOKENS)
    """Type of the tokenizer; default: GPT2BPETokenizer with --vocab-file and --merge-file, else none."""
    tokenizer_model: str | None = setting(
        None, when=c.TOKENIZER_MODEL, resume=Resume.TOKENS, aliases="tokenizer_name_or_path"
    )
    """File or folder of the tokenizer."""
    vocab_file: str | None = setting(None, when=c.GPT2_TOKENIZER, resume=Resume.TOKENS)
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = setting(None, when=c.GPT2_TOKENIZER, resume=Resume.TOKENS)
    """Merges file of GPT2BPETokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = setting(None, when=c.TIKTOKENIZER, resume=Resume.TOKENS)
    """Regular expression with which TikTokenizer splits text into words; default: v2."""
    tiktoken_num_special_tokens: int = setting(1000, r.integers(0, 10**6), when=c.TIKTOKENIZER, resume=Resume.TOKENS)
    """Number of ids before all others that TikTokenizer reserves for special tokens."""
    vocab_size: int | None = setting(None, r.SIZE, when=ALWAYS, resume=Resume.TOKENS)
    """Vocabulary size; default: the tokenizer's. Required for NullTokenizer and without a tokenizer. TikTokenizer
    truncates its vocabulary to this size."""

    @property
    def divided_sources(self) -> list[str]:
        """The given sources of tokens that --split divides into training, validation and test."""
        return [name for name in ("data_path", "data_args_path") if getattr(self, name)]

    @property
    def phase_hooks(self) -> str:
        """Module with the functions of ``features.data_phases.phases``, if training reads several blends one after
        another; else ""."""
        return ""

    @property
    def tokenizer(self) -> TokenizerType | None:
        """The type of the tokenizer after defaults; None: no tokenizer."""
        both = self.vocab_file is not None and self.merge_file is not None
        return self.tokenizer_type or ("GPT2BPETokenizer" if both else None)

    @property
    def length_growth(self) -> Growth:
        """Tokens in a sequence as a function of the samples consumed."""
        return constant(self.seq_length)

    @property
    def length_units(self) -> tuple[int, ...]:
        """Numbers of tokens of which every sequence length is a sum."""
        return (self.seq_length,)
