"""The files of a tokenizer and its chat template that a checkpoint keeps."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_core.tokenizers.base import Tokenizer

# Templates are only copied here, from a tokenizer to checkpoints; conversations read them.
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
BUILT_IN_TEMPLATES = Path(__file__).with_name("templates")


def stored_name(path: Path) -> str:
    """The name of a file of a tokenizer, relative to the tokenizer's folder."""
    return f"{TEMPLATE_FOLDER}/{path.name}" if path.parent.name == TEMPLATE_FOLDER else path.name


def template_path(name: str) -> Path:
    """The file of a chat template, which is a path or the name of a template of this package."""
    built_in = {path.stem: path for path in BUILT_IN_TEMPLATES.glob("*.jinja")}
    path = Path(name)
    return path if path.exists() else built_in.get(name, path)


def files_to_store(tokenizer: "Tokenizer | None", chat_template: str | None = None) -> dict[str, Path]:
    """The files that a checkpoint keeps, by their names in it; ``chat_template`` replaces the default template."""
    files = {f"tokenizer/{stored_name(path)}": path for path in (tokenizer.files() if tokenizer else ())}
    if chat_template is not None and template_path(chat_template).is_file():
        files[f"tokenizer/{TEMPLATE_FILE}"] = template_path(chat_template)
    return files
