from .cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .layers import ColumnParallelLinear as ColumnParallelLinear
from .layers import ModelParallelConfig as ModelParallelConfig
from .layers import RowParallelLinear as RowParallelLinear
from .layers import VocabParallelEmbedding as VocabParallelEmbedding
from .random import KeyedDropout as KeyedDropout
