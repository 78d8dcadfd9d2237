"""A model, its settings and its engine from ``get_args()``."""

from argparse import ArgumentParser, Namespace
from typing import Any

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.checkpointing import load_checkpoint
from megatron.training.global_vars import get_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron_core.errors import ConfigError
from megatron_core.text_file import read_table

FLAGS = read_table(__file__)


def add_inference_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of Megatron-LM's programs for generation to ``parser``."""
    group = parser.add_argument_group(title="Inference")
    for name, (kind, default, text) in FLAGS["numbers"].items():
        group.add_argument(f"--{name}", type=float if kind == "float" else int, default=default, help=text)
    for name in FLAGS["switches"].split():
        group.add_argument(f"--{name}", action="store_true")
    for name in FLAGS["texts"].split():
        group.add_argument(f"--{name}")
    group.add_argument("--prompts", nargs="+", metavar="TEXT")
    group.add_argument("--stop-words", nargs="+", metavar="WORD")
    group.add_argument("--num-tokens-to-prompt", type=int, nargs="+", default=[64, 1024])
    group.add_argument("--no-record-throughput", action="store_false", dest="record_throughput")
    group.add_argument("--model-provider", choices=["hybrid", "mamba", "gpt"], default="gpt")
    return parser


def get_model_builder(args: Namespace, provider: str | None = None) -> GPTModelBuilder:
    """Return the builder of the model of ``args``. Errors: ``ConfigError`` for another provider than gpt."""
    provider = provider or args.model_provider
    if provider != "gpt":
        raise ConfigError(f"model_provider={provider!r} is not supported; give gpt")
    return GPTModelBuilder(gpt_config_from_args(args))


def get_model_for_inference() -> Any:
    """Build the model of ``get_args()`` and load its checkpoint."""
    args = get_args()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = get_model_builder(args).build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
    if args.load is None:
        raise ConfigError("load=None: give --load FOLDER with a trained model")
    args.exit_on_missing_checkpoint = True
    load_checkpoint(model, None, None, strict=not args.inference_ckpt_non_strict)
    if len(model) != 1:
        raise ConfigError(f"the model has {len(model)} chunks; generate without virtual pipeline stages")
    model[0].eval()
    return model[0]


def get_inference_config_from_model_and_args(model: Any, args: Namespace) -> InferenceConfig:
    """Return the settings of an engine; flags that the program does not have keep their defaults."""
    flag = "inference_dynamic_batching_"
    named = {
        "block_size_tokens": flag + "block_size",
        "buffer_size_gb": flag + "buffer_size_gb",
        "max_requests": flag + "max_requests",
        "max_tokens": flag + "max_tokens",
        "max_sequence_length": "inference_max_seq_length",
        "enable_chunked_prefill": "enable_chunked_prefill",
        "enable_prefix_caching": flag + "prefix_caching",
        "track_generated_token_events": flag + "track_generated_token_events",
    }
    given = {name: getattr(args, own, None) for name, own in named.items()}
    only_last = not getattr(args, "return_log_probs", False)
    return InferenceConfig(
        **{name: value for name, value in given.items() if value is not None},
        materialize_only_last_token_logits=only_last,
    )


def get_dynamic_inference_engine(model: Any = None) -> DynamicInferenceEngine:
    """Return an engine over ``model``, by default that of ``get_args()``."""
    args = get_args()
    model = get_model_for_inference() if model is None else model
    context = DynamicInferenceContext(model.config, get_inference_config_from_model_and_args(model, args))
    controller = TextGenerationController(GPTInferenceWrapper(model, context), build_tokenizer(args))
    return DynamicInferenceEngine(controller, context)
