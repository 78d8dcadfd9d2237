"""A model with its context of generation."""

from typing import Any

from torch import Tensor

from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from megatron.core.inference.engine_model import forward_of_context, generator_of
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_model_config, unwrap_model
from megatron_core.errors import ConfigError
from megatron_core.inference.generator import Generator


class AbstractModelInferenceWrapper:
    """A model, on its own or as pipeline stages, with its context of generation.

    ``inference_wrapper_config`` and ``pg_collection`` are former arguments without effect.
    """

    def __init__(
        self,
        model: Any,
        inference_context: BaseInferenceContext | None = None,
        *args: Any,
        inference_wrapper_config: Any = None,
        pg_collection: Any = None,
    ) -> None:
        if isinstance(model, list):
            if len(model) != 1:
                raise ConfigError(f"the model has {len(model)} chunks; generation needs one chunk per pipeline stage")
            model = model[0]
        if inference_context is not None and not isinstance(inference_context, BaseInferenceContext):
            # The former order of the arguments: model, inference_wrapper_config, inference_context.
            inference_context = args[0] if args else None
        self.model, self.config = model, get_model_config(unwrap_model(model))
        self.inference_context = inference_context
        self._generator: Generator | None = None

    @property
    def gpt(self) -> GPTModel:
        """The model without its wrappers."""
        inner = unwrap_model(self.model)
        if not isinstance(inner, GPTModel):
            raise ConfigError(f"{type(inner).__name__} cannot generate; pass a GPTModel of megatron.core")
        return inner

    @property
    def generator(self) -> Generator:
        """The engine's view of the model."""
        if self._generator is None:
            self._generator = generator_of(self.gpt)
        return self._generator

    def prep_model_for_inference(self) -> None:
        """Put the model into evaluation mode and begin a batch."""
        self.model.eval()
        if isinstance(self.inference_context, StaticInferenceContext):
            self.inference_context.reset()

    def run_one_forward_step(self, inference_input: dict[str, Any]) -> Tensor | None:
        """Return logits ``[b, s, v]`` of the next tokens ``[b, s]`` of a static batch, whose keys and values are kept.

        With ``materialize_only_last_token_logits``, ``s`` of the result is 1. None on ranks without the last stage.
        """
        context = self.inference_context
        if not isinstance(context, StaticInferenceContext):
            raise ConfigError("run_one_forward_step needs a StaticInferenceContext; DynamicInferenceEngine has others")
        return forward_of_context(self.generator, context, inference_input["tokens"])

    __call__ = run_one_forward_step
