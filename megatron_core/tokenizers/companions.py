"""Files that `transformers` stores next to a tokenizer: special tokens, chat templates, settings of generation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_core.tokenizers.base import Tokenizer

# The second file overrides the first, as in the `transformers` library.
NAME_FILES = ("special_tokens_map.json", "tokenizer_config.json")
# Its eos_token_id is one id or a list of ids.
GENERATION_FILE = "generation_config.json"
# Templates are only copied here, from a tokenizer to checkpoints; conversations read them.
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
BUILT_IN_TEMPLATES = Path(__file__).with_name("templates")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def companion_files(folder: Path) -> list[Path]:
    """The files in the folder of a tokenizer that are not its vocabulary."""
    names = (*NAME_FILES, GENERATION_FILE, "added_tokens.json", TEMPLATE_FILE)
    files = [folder / name for name in names if (folder / name).is_file()]
    return [*files, *(path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")) if path.is_file())]


def vocabulary_files(folder: Path) -> list[Path]:
    """The vocabulary files in the folder, which may contain one vocabulary in several formats."""
    return [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]


def other_vocabularies(path: Path) -> list[Path]:
    """The vocabulary next to ``path`` in other formats, if ``path`` has a name that `transformers` uses."""
    return [other for other in vocabulary_files(path.parent) if path.name in VOCABULARY_FILES and other != path]


def stored_name(path: Path) -> str:
    """The name of a file of a tokenizer, relative to the tokenizer's folder."""
    return f"{TEMPLATE_FOLDER}/{path.name}" if path.parent.name == TEMPLATE_FOLDER else path.name


def template_path(name: str) -> Path:
    """The file of a chat template, which is a path or the name of a template of this package."""
    built_in = {path.stem: path for path in BUILT_IN_TEMPLATES.glob("*.jinja")}
    path = Path(name)
    return path if path.exists() else built_in.get(name, path)


def files_to_store(tokenizer: Tokenizer | None, chat_template: str | None = None) -> dict[str, Path]:
    """The files that a checkpoint keeps, by their names in it; ``chat_template`` replaces the default template."""
    files = {f"tokenizer/{stored_name(path)}": path for path in (tokenizer.files() if tokenizer else ())}
    if chat_template is not None and template_path(chat_template).is_file():
        files[f"tokenizer/{TEMPLATE_FILE}"] = template_path(chat_template)
    return files
