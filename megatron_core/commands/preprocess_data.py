r"""Convert text to token files for training.

megatron-preprocess --input corpus.jsonl --output-prefix corpus \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

Writes corpus_text_document.bin and .idx, byte for byte as Megatron-LM does, and a .json that names the tokenizer;
unreadable and empty documents are listed in corpus_problems.txt. After an interruption, a full disk or a damaged input
file, the same command resumes (corpus.work keeps the progress). Memory does not depend on the size of the input: each
worker holds 0.25 MiB of text with its tokens, or one document of up to 256 MiB, and three tasks of 4 MiB.
"""

from __future__ import annotations

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("preprocess_data")

import sys
from typing import NoReturn

import tyro

from megatron_core.command import program, run_tool
from megatron_core.preprocess import PreprocessSettings, preprocess
from megatron_core.preprocess.megatron_flags import translate
from megatron_core.terminal import parse_flags


def main() -> NoReturn:
    """Parse the flags, run and exit."""
    run_tool(program(), _run, interrupted="interrupted; run the same command to resume")


def _run() -> None:
    flags = translate(sys.argv[1:])
    preprocess(parse_flags(PreprocessSettings, args=flags, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
