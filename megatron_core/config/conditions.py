"""Conditions that several settings share: the flags or properties of a run without which it does not read them."""

from megatron_core.config.setting import Condition, given, unless, without

# Training, ranks and devices.
TRAINING = unless("--skip-train", lambda run: run.training.skip_train)
SEVERAL_RANKS = Condition("several ranks", lambda run: run.world_size > 1)
SEVERAL_DATA_RANKS = Condition("several data-parallel ranks", lambda run: run.data_ranks > 1)
SEVERAL_DATA_RANKS_OR_FILES = Condition(
    SEVERAL_DATA_RANKS.words, lambda run: run.data_ranks > 1 or run.parallel.offloads_weights
)
SEVERAL_EXPERT_RANKS = Condition("experts split over ranks", lambda run: run.expert_ranks > 1)
GPU = Condition("a GPU", lambda run: run.device != "cpu")

# The model.
NO_LATENT_ATTENTION = without("multi_latent_attention")
ROTARY = Condition("--position-embedding-type rope", lambda run: run.attention.has_rotary)
POSITIONS = Condition("positions", lambda run: run.model.position_embedding_type != "none" or run.attention.has_rotary)
WINDOW = given("window_size", "BEFORE 0")
WINDOWED_LAYER = Condition("a layer with the window", lambda run: run.model.has_windows)
LAYER_NORM = Condition("--normalization LayerNorm", lambda run: run.model.normalization == "LayerNorm")
RMS_NORM = Condition("--normalization RMSNorm", lambda run: run.model.normalization == "RMSNorm")
QK_LAYERNORM = given("qk_layernorm")
GELU = unless(
    "--swiglu, --quick-geglu, --squared-relu, --relu or --xielu",
    lambda run: any(getattr(run.model, name) for name in ("swiglu", "quick_geglu", "squared_relu", "relu", "xielu")),
)
GATED = Condition("--swiglu, --geglu or --quick-geglu", lambda run: run.model.gated_linear_unit)
UNFUSED_ATTENTION = Condition(
    "--attention-backend unfused, or dropout or soft capping of attention",
    lambda run: (
        run.model.attention_backend == "unfused"
        or run.model.attention_dropout
        or run.model.attn_logit_softcapping is not None
    ),
)
FULL_RECOMPUTE = Condition("--recompute-granularity full", lambda run: run.model.recompute_granularity == "full")
SELECTIVE_RECOMPUTE = Condition(
    "--recompute-granularity selective", lambda run: run.model.recompute_granularity == "selective"
)

# Experts, which are a feature.
EXPERTS = given("num_experts", "N")
NO_EXPERTS = without("num_experts")
DENSE_LAYER = unless(
    "experts of --moe-ffn-hidden-size in every layer",
    lambda run: (
        (run.optional("moe_ffn_hidden_size") or not run.model.may_have_feed_forward("experts"))
        and not any(map(run.model.has_dense_mlp, range(run.model.num_layers)))
    ),
)

OPTIMIZED_POSITIONS = Condition(
    "--position-embedding-type learned_absolute, and --decoupled-lr X or an --optimizer of matrices",
    lambda run: (
        run.model.position_embedding_type == "learned_absolute"
        and (run.optimizer.decoupled_lr is not None or any(row.scalar_optimizer for row in run.optimizer.kinds))
    ),
)

# The layout.
LAYOUT_INVARIANT = given("layout_invariant")
ZERO = Condition("--zero-stage 1, 2 or 3", lambda run: run.parallel.dp_zero_stage)
ZERO_3 = Condition("--zero-stage 3", lambda run: run.parallel.dp_zero_stage == 3)
TENSOR_PARALLEL = Condition("--tensor-model-parallel-size N", lambda run: run.parallel.tensor_model_parallel_size > 1)
PIPELINE = Condition("--pipeline-model-parallel-size N", lambda run: run.parallel.pipeline_model_parallel_size > 1)
ZERO_IN_BF16 = Condition(
    "gradients in bfloat16 and --zero-stage 1 or more",
    lambda run: run.parallel.reduces_in_bf16 and run.parallel.dp_zero_stage,
)
CORRECTS_BIAS = unless("a --grad-compression without bias correction", lambda run: not run.corrects_bias)

# The optimizer.
BF16 = given("bf16")
SIXTEEN_BITS = Condition("--bf16 or --fp16", lambda run: run.training.bf16 or run.training.fp16)
OPTIMIZER_OFFLOAD = Condition(
    "--optimizer-cpu-offload or --optimizer-offload-dir", lambda run: run.optimizer.offloads_optimizer
)
NO_OFFLOAD_DIR = unless("--optimizer-offload-dir", lambda run: run.optimizer.optimizer_offload_dir is not None)
CONSTANT_WEIGHT_DECAY = Condition(
    "--weight-decay-incr-style constant", lambda run: run.optimizer.weight_decay_incr_style == "constant"
)
WARMUP = Condition("a warm-up", lambda run: run.optimizer.has_warmup)
WSD = Condition("--lr-decay-style WSD", lambda run: run.optimizer.lr_decay_style == "WSD")
LR_DECAY = Condition("another --lr-decay-style", lambda run: run.optimizer.lr_decay_style != "constant")

# Data.
DIVIDED_DATA = Condition("--data-path", lambda run: run.data.divided_sources)
TOKENIZER_MODEL = Condition(
    "a --tokenizer-type that reads it",
    lambda run: run.data.tokenizer not in (None, "GPT2BPETokenizer", "ByteLevelTokenizer", "NullTokenizer"),
)
OWN_DATA = Condition("data of this run", lambda run: run.data.dataloader_type != "external")
TOKEN_FILES = Condition(
    "token files",
    lambda run: (
        run.data.dataloader_type != "external" and (not run.data.mock_data or run.data.data_order == "megatron")
    ),
)
GPT2_TOKENIZER = Condition(
    "--tokenizer-type GPT2BPETokenizer",
    lambda run: run.data.tokenizer == "GPT2BPETokenizer" and run.data.vocab_file and run.data.merge_file,
)
TIKTOKENIZER = Condition("--tokenizer-type TikTokenizer", lambda run: run.data.tokenizer_type == "TikTokenizer")
EVALUATION = given("eval_iters", "N")

# Checkpoints.
SAVE = given("save", "FOLDER")
OTHER_FORMAT = Condition("--ckpt-format torch_dist", lambda run: run.checkpoint.ckpt_format != "native")
LOAD = given("load", "FOLDER")
NO_FINETUNE = unless("--finetune", lambda run: run.checkpoint.finetune)
OWN_SCHEDULE = unless(
    "--use-checkpoint-opt-param-scheduler", lambda run: run.checkpoint.use_checkpoint_opt_param_scheduler
)
FAST_RESTART = given("non_persistent_save_interval", "N")
GLOBAL_FAST_RESTART = Condition(
    "--non-persistent-ckpt-type global", lambda run: run.checkpoint.non_persistent_ckpt_type == "global"
)

# Records.
BAD_STEPS = given("max_bad_steps", "N")
