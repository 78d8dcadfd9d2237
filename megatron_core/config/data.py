"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_core.config.ramp import Ramp

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files, splits and the tokenizer."""

    seq_length: int = 64
    """Tokens in a training sequence."""
    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files, or a blend: weight prefix weight prefix ..."""
    data_args_path: str | None = None
    """Text file that holds what --data-path would be given."""
    train_data_path: tuple[str, ...] = ()
    """As data_path, for training alone; excludes data_path and split."""
    valid_data_path: tuple[str, ...] = ()
    """As data_path, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """As data_path, for the test split alone."""
    per_split_data_args_path: str | None = None
    """JSON file with the keys train, valid and test, each as --train-data-path and its companions would be given."""
    data_phases: str | None = None
    """YAML file of blends that follow one another in training: a list of {samples: N, data_path: [...]}, the last
    without samples. A file that is in several phases goes on where it was."""
    split: str | None = None
    """Shares of train, validation and test in data_path; default 969,30,1."""
    data_order: Literal["keyed", "megatron"] = "keyed"
    """Order of the samples: keyed is computed from the seed and the sample's number, with nothing to build or store;
    megatron is Megatron-LM's for the same seed, so that a training begun there goes on with the same batches."""
    data_cache_path: str | None = None
    """Folder in which --data-order megatron keeps its indices; default none are kept."""
    mid_level_dataset_surplus: float = 0.005
    """What --data-order megatron asks of each file of a blend beyond its share, as a part of it."""
    num_dataset_builder_threads: int = 1
    """Threads that open the files of a blend, and build their indices, at the same time."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single: one long pass. cyclic: rounds over one epoch's samples, each in an order of its own. external: data sets
    of your own, which a script hands to megatron_core.training.pretrain."""
    num_workers: int = 2
    """Threads of each rank that read the next step's micro-batches; 0 reads them when they are needed."""
    seq_length_warmup: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: sequences are cut to START tokens at first, and to INCREMENT more in equal steps over
    the first SAMPLES samples, up to --seq-length (Li et al. 2021)."""
    mock_data: bool = False
    """Train on made-up sequences instead of files; needs --vocab-size."""
    eod_mask_loss: bool = False
    """No loss where the input token is the end of a document."""
    reset_position_ids: bool = False
    """Positions restart at 0 after each end of a document."""
    reset_attention_mask: bool = False
    """No token sees another document of its sequence. An end-of-document token still predicts the next document's first
    token, unless --eod-mask-loss is given too."""
    fim_data: bool = False
    """Fill in the middle: rearrange documents so that the model learns to write what is missing inside a text."""
    fim_rate: float = 0.5
    """Share of the documents that --fim-data rearranges."""
    fim_spm_rate: float = 0.5
    """Share of the rearranged documents whose suffix comes before the prefix (SPM)."""
    fim_split_sample: str | None = None
    """Token around which a chosen document is split into fragments, each rearranged on its own."""
    fim_fragment_rate: float | None = None
    """Share of a chosen document's fragments that are rearranged; needed with fim_split_sample."""
    fim_no_prefix: str | None = None
    """Documents or fragments that begin with this text stay as they are."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token that stands before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token that stands before the middle, which comes last."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token that stands before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills up a sequence whose documents got shorter; it never counts in the loss."""
    fim_eod_token: str | None = None
    """Token that ends a document; default the tokenizer's own end of a document."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    vocab_file: str | None = None
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges file of GPT2BPETokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """How TikTokenizer cuts text into words; default v2."""
    tiktoken_num_special_tokens: int = 1000
    """Ids that TikTokenizer keeps for special tokens, before those of the text."""
    vocab_size: int | None = None
    """Vocabulary size where no tokenizer tells it (NullTokenizer, --mock-data, or data alone); TikTokenizer is cut to
    it."""

    @property
    def length_ramp(self) -> Ramp:
        """Tokens of a sequence over the samples consumed."""
        return Ramp.of(self.seq_length_warmup, self.seq_length)
