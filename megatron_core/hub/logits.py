"""Compares logits of a checkpoint with those that `transformers`, with adapters `peft`, computes."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint import parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.sparse_attention.settings import SparseAttentionConfig
from megatron_core.hub.hugging_face import stored_dtype
from megatron_core.hub.hugging_face.classifier import is_value_model, numbers_of
from megatron_core.models import GPTModel
from megatron_core.models.gpt.model import HeadOptions
from megatron_core.tensor_parallel import ModelParallelConfig

TOLERANCE = 1e-4
"""Largest difference of logits, over the largest logit; both are computed in float32."""
PROMPT_LENGTHS = (1, 7, 32)


def compare_logits(
    open_reader: Callable[[], Any],
    config: RunConfig,
    folder: Path,
    dtype: torch.dtype | None,
    *,
    adapter: Path | None = None,
) -> float:
    """Compare the logits of a reader, with weights rounded to ``dtype``, with `transformers` on a Hugging Face folder.

    ``open_reader`` opens a checkpoint, a Hugging Face folder or merged adapters; `peft` adds those in ``adapter``.

    Returns (largest difference) / (largest logit) on fixed prompts in float32. The reader is closed before
    `transformers` loads all weights, because its mapped files would count as memory, too.

    Errors: ``CheckpointError`` if the result is above ``TOLERANCE``, or `transformers` or `peft` is not
    installed.
    """
    learned = config.model.position_embedding_type == "learned_absolute"
    with open_reader() as reader:
        prompts = fixed_prompts(reader.state["vocab_size"], config.max_positions if learned else max(PROMPT_LENGTHS))
        ours = our_logits(reader, config, prompts, dtype)
    theirs = their_logits(folder, prompts) if adapter is None else their_logits(folder, prompts, adapter)
    scale = max(logits.abs().max().item() for logits in theirs)
    difference = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / scale
    if not difference <= TOLERANCE and adapter is not None:
        raise CheckpointError(
            f"the logits of peft {version('peft')} with these adapters differ by {difference:.1e} of the largest one, "
            "because it does not load adapters of MLPs in all architectures with experts. Nothing was written; write "
            "the merged model with --to hf, or, for another program such as vLLM, convert with --no-verify"
        )
    if not difference <= TOLERANCE:
        selects = config.model.section(SparseAttentionConfig).has_sparse_attention and config.model.section(
            SparseAttentionConfig
        ).dsa_indexer_topk < max(PROMPT_LENGTHS)
        ties = ", or transformers selects other keys of equal index scores (then convert with --no-verify)"
        raise CheckpointError(
            f"the logits of both sides differ by {difference:.1e} of the largest one, more than {TOLERANCE:.0e}: "
            f"{folder} has unsupported settings, or a file is damaged{ties if selects else ''}; nothing was written"
        )
    return difference


def fixed_prompts(vocab_size: int, longest: int) -> list[Tensor]:
    """Sequences of token ids ``[1, length]``, equal in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (1, min(length, longest)), generator=generator) for length in PROMPT_LENGTHS]


@torch.no_grad()
def our_logits(reader: Any, config: RunConfig, prompts: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Logits ``[1, length, vocabulary]`` of each prompt, in float32, with weights rounded to ``dtype``.

    ``dtype`` defaults to the stored dtype of each weight. Computed layer by layer, as stages of a pipeline, so that
    only one layer is in memory at a time.
    """
    parallel = ModelParallelConfig(params_dtype=torch.float32, perform_initialization=False)
    last_layer = config.model.num_layers - 1
    hidden: list[Tensor] = []
    for layer in range(last_layer + 1):
        stage = GPTModel(
            config.model,
            reader.state["vocab_size"],
            config.longest_text,
            parallel=parallel,
            layers=[layer],
            pre_process=layer == 0,
            post_process=layer == last_layer,
        ).eval()
        reader.fill(parameter_pieces(stage.named_global_parameters()))
        for name, parameter in stage.named_global_parameters():
            parameter.copy_(parameter.to(stored_dtype(name, dtype or reader.dtype_of(f"model.{name}"))))
        inputs: list[Tensor | None] = [*hidden] or [None for _ in prompts]
        hidden = []
        for prompt, x in zip(prompts, inputs, strict=True):
            if config.model.longest_text_scales_rotary:  # transformers chooses the factors by the length of each text
                stage.max_sequence_length = prompt.shape[1]
            if config.optional("value_head"):
                # A value of each token: there are no logits.
                values = HeadOptions(logit_loss=lambda numbers, _: numbers.squeeze(-1))
                hidden.append(stage(prompt, hidden_states=x, labels=prompt, head=values))
            else:
                hidden.append(stage(prompt, hidden_states=x))
    return hidden


@torch.no_grad()
def their_logits(folder: Path, prompts: list[Tensor], adapter: Path | None = None) -> list[Tensor]:
    """Logits of each prompt computed by `transformers`, with the adapters in ``adapter`` by `peft`."""
    library = "transformers" if adapter is None else "peft"
    try:
        import transformers

        if adapter is not None:
            import peft
    except ImportError:
        raise CheckpointError(
            f"verifying needs {library}: pip install {library}; or convert with --no-verify"
        ) from None
    # Not scaled_dot_product_attention, with which some of its models ignore settings.
    try:
        # Some multimodal models have no class for text alone; their class for images computes text, too.
        settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        task = "CausalLM" if type(settings) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else "ImageTextToText"
        task = "SequenceClassification" if is_value_model(settings.to_dict()) else task
        model_class = getattr(transformers, f"AutoModelFor{task}")
        model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter).eval()
        return [numbers_of(model, prompt) for prompt in prompts]
    except MemoryError:
        raise
    except Exception as error:  # it raises various types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{library} {version(library)} cannot compute the logits of {adapter or folder}: {reason}; "
            f"{'correct its config.json' if adapter is None else 'write the merged model with --to hf'}, or convert "
            "with --no-verify"
        ) from error
