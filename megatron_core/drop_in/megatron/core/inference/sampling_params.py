"""Settings of sampling, one set for each request."""

import warnings
from dataclasses import asdict, dataclass
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.inference.sampling import Sampling


@dataclass
class SamplingParams:
    """Settings of sampling with Megatron Core's names and defaults.

    ``top_k=1`` chooses the most likely token; 0 turns ``top_k`` and ``top_p`` off, and both at once are an error.
    ``num_tokens_to_generate`` is the number of new tokens, ``num_tokens_total`` that of prompt and new tokens; by
    default a text grows to the longest sequence of its context. ``termination_id`` is the token that ends a text, by
    default ``eod`` of the tokenizer; -1: none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    return_prompt_top_n_logprobs: bool = False
    add_BOS: bool = False
    stop_words: list[str] | None = None
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = False
    streaming_interval: int = 1
    """No effect: a stream has the state after each token."""

    def __post_init__(self) -> None:
        self._sync_prompt_logprobs_fields()

    def _sync_prompt_logprobs_fields(self) -> None:
        """Derive the deprecated ``return_prompt_top_n_logprobs`` from the settings that replace it."""
        if self.return_prompt_top_n_logprobs:
            warnings.warn(
                "return_prompt_top_n_logprobs is deprecated; set skip_prompt_log_probs instead",
                DeprecationWarning,
                stacklevel=3,
            )
            assert not self.skip_prompt_log_probs, (
                "return_prompt_top_n_logprobs requires skip_prompt_log_probs to be False"
            )
        self.return_prompt_top_n_logprobs = self.top_n_logprobs > 0 and not self.skip_prompt_log_probs
        if type(self.streaming_interval) is not int or self.streaming_interval < 1:
            raise ConfigError(
                f"streaming_interval={self.streaming_interval!r} must be an integer greater than or equal to 1"
            )

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set attributes, also ones that are not fields."""
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)
        self._sync_prompt_logprobs_fields()

    def serialize(self) -> dict[str, Any]:
        """Return the attributes as a dictionary."""
        return dict(vars(self))

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> "SamplingParams":
        """Return the settings of a dictionary of ``serialize``."""
        made = cls()
        made.add_attributes(data)
        return made

    def for_engine(self, seed: int) -> Sampling:
        """Return the engine's settings."""
        if self.top_k > 0 and self.top_p > 0.0:
            raise ConfigError(f"top_k={self.top_k} and top_p={self.top_p} exclude each other; set one of them to 0")
        temperature = 0.0 if self.top_k == 1 else self.temperature
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p or 1.0, seed=seed)

    def replaced(self, **values: Any) -> "SamplingParams":
        """Return a copy with other values."""
        return type(self)(**{name: value for name, value in asdict(self).items()} | values)


CommonInferenceParams = SamplingParams
