"""The engine's tokenizers with Megatron's further names."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.features.conversations.chat_template import ChatTemplate, chat_template_of
from megatron_core.tokenizers.base import Tokenizer


class MegatronTokenizerText:
    """A tokenizer of the engine; its own attributes are found, too.

    ``bos_id``, ``eos_id`` and ``pad_id`` are other names of ``bos``, ``eos`` and ``pad``. ``library`` is the name in
    the metadata; ``chat_template`` is a Jinja template or its file, by default the template of the tokenizer's folder.
    """

    def __init__(
        self, engine: Tokenizer, library: str, path: str | None = None, chat_template: str | None = None
    ) -> None:
        self.engine, self.library, self.path, self.chat_template = engine, library, path, chat_template

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine's tokenizer."""
        if name == "engine" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.engine, name)

    @property
    def bos_id(self) -> int | None:
        """The id of the beginning of a sequence."""
        return self.engine.bos

    @property
    def eos_id(self) -> int | None:
        """The id of the end of a sequence."""
        return self.engine.eos if self.engine.eos is not None else self.engine.eod

    @property
    def pad_id(self) -> int | None:
        """The id of padding."""
        return self.engine.pad

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The class, the path and the fingerprint of the vocabulary."""
        kind = type(self.engine)
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "tokenizer_path": [self.path],
            "fingerprint": self.engine.fingerprint(),
        }

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool | None = None) -> str:
        """Return the text of ids; ``skip_special_tokens`` leaves out tokens that begin, end and pad a text."""
        if skip_special_tokens:
            own = self.engine
            special = {own.bos, own.eos, own.eod, own.pad, *getattr(own, "turn_ends", ())}
            ids = [i for i in ids if int(i) not in special]
        return self.engine.detokenize(ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Any = None,
    ) -> list[int] | str:
        """Return the ids of messages (role and content) in the form of a template, or their text without ``tokenize``.

        Raises ConfigError without a template.
        """
        given = chat_template or self.chat_template
        template = ChatTemplate(given, {}) if given and "{" in given else chat_template_of(self.engine, given)
        if template is None:
            raise ConfigError(f"the tokenizer {self.path} has no chat template; pass chat_template=")
        text = template.render(conversation, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.engine.tokenize(text) if tokenize else text
