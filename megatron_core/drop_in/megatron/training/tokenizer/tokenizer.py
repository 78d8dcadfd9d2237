"""The tokenizer of the arguments, at its former path."""

from megatron.core.datasets.megatron_tokenizer import MegatronLegacyTokenizer as MegatronTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding as _vocab_size_with_padding
