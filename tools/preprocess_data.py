r"""Turn text into token files that training reads.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

Writes corpus_text_document.bin and .idx, byte for byte as Megatron's, and a .json that names the tokenizer; the list
of broken and empty documents, where there are any, is corpus_problems.txt. Killed or out of disk space it goes on
where it was when the same command is given again (corpus.work keeps the state). Memory is bounded whatever the input:
each worker holds a quarter of a MiB of text with its tokens, or the longest document, of 256 MiB at most.
"""

from __future__ import annotations

import sys

import tyro

from megatron_core.datasets.prepare import PrepareSettings, prepare
from megatron_core.datasets.prepare.megatron_flags import translate
from megatron_core.errors import MegatronError


def main() -> None:
    """Parse the flags and run; one line on stderr and status 1 for an error that has a way out."""
    try:
        given = translate(sys.argv[1:])
        prepare(tyro.cli(PrepareSettings, args=given, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
    except (MegatronError, OSError) as error:
        sys.exit(f"preprocess_data: {error}")
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
