"""The note that an evaluation has no data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.preprocess import preprocess
from megatron_core.preprocess.settings import PreprocessSettings
from megatron_core.training.pretrain import notes
from megatron_core.training.setup import set_up
from tests.runs import TINY

TOLD = "eval_iters=2 evaluates on no validation data"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text(" ".join(str(n % 60) for n in range(4000)))
    settings = PreprocessSettings(
        input=(str(folder / "text.txt"),), output_prefix=str(folder / "a"), tokenizer_type="NullTokenizer",
        vocab_size=61, workers=1,
    )  # fmt: skip
    preprocess(settings)
    return str(folder / "a_text_document")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_path": "FILE", "split": "100,0,0"}, "split=100,0,0 gives it none of the data; give --split 98,2,0"),
        ({"data_path": "FILE", "split": "90,0,10"}, "split=90,0,10 gives it none"),
        ({"train_data_path": "FILE"}, "give --valid-data-path or --eval-iters 0"),
        ({"train_data_path": "FILE", "valid_data_path": "FILE"}, None),
        ({"data_path": "FILE", "split": "100,0,0", "eval_iters": 0}, None),
        ({"mock_data": True}, None),
    ],
)
def test_evaluation_without_data(settings: dict[str, object], words: str | None, tokens: str) -> None:
    files = {name: (tokens,) if value == "FILE" else value for name, value in settings.items()}
    flags = TINY | {"mock_data": False, "tokenizer_type": "NullTokenizer", "eval_iters": 2} | files
    run = set_up(RunConfig.from_flat(flags), World(0, 1, 0, torch.device("cpu")))
    told = [note for note in notes(run) if TOLD in note]
    assert len(told) == (words is not None) and all(str(words) in note for note in told)


def test_files_of_tokens_with_a_byte_order_mark(tokens: str, tmp_path: Path) -> None:
    """The mark is not part of the first weight or path in --data-args-path."""
    (tmp_path / "args.txt").write_text(f"{tokens}\n", encoding="utf-8-sig")
    flags = TINY | {"mock_data": False, "tokenizer_type": "NullTokenizer", "data_args_path": str(tmp_path / "args.txt")}
    run = set_up(RunConfig.from_flat(flags), World(0, 1, 0, torch.device("cpu")))
    assert run.splits.train is not None
