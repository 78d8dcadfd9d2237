from .base import Tokenizer as Tokenizer
from .base import dropped_bytes as dropped_bytes
from .base import end_ids as end_ids
from .build import build_tokenizer as build_tokenizer
from .build import tokenizer_kinds as tokenizer_kinds
from .build import tokenizer_of as tokenizer_of
from .built_in import ByteLevelTokenizer as ByteLevelTokenizer
from .built_in import NullTokenizer as NullTokenizer
