"""The files of a tokenizer's folder, with the names that `transformers` uses."""

from pathlib import Path

from megatron_core.tokenizers.companions import TEMPLATE_FILE, TEMPLATE_FOLDER

# The second file overrides the first, as in the `transformers` library.
NAME_FILES = ("special_tokens_map.json", "tokenizer_config.json")
# Its eos_token_id is one id or a list of ids.
GENERATION_FILE = "generation_config.json"
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
