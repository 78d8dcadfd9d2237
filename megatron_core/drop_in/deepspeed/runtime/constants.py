"""Names of keys of the JSON, and defaults."""

from deepspeed.reader import TRIPLE
from deepspeed.translation import CLIPPING as GRADIENT_CLIPPING_DEFAULT

TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU, GRADIENT_ACCUMULATION_STEPS = TRIPLE
GRADIENT_CLIPPING = "gradient_clipping"
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"
FP16, BFLOAT16, ZERO_OPTIMIZATION = "fp16", "bf16", "zero_optimization"
