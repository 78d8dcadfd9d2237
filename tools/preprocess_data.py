r"""Turn text into token files that training reads.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

Writes corpus_text_document.bin and .idx, byte for byte as Megatron-LM does, and a .json that names the tokenizer;
unreadable and empty documents are listed in corpus_problems.txt. After an interruption, a full disk or a damaged input
file, the same command resumes (corpus.work keeps the progress). Memory does not depend on the size of the input: each
worker holds 0.25 MiB of text with its tokens, or one document of up to 256 MiB, and three tasks of 4 MiB.
"""

from __future__ import annotations

import sys

import tyro

from megatron_core.errors import MegatronError
from megatron_core.preprocess import PreprocessSettings, preprocess
from megatron_core.preprocess.megatron_flags import translate


def main() -> None:
    """Parse the flags and run; exit with one line on stderr and status 1 for an error in the settings or the data."""
    try:
        given = translate(sys.argv[1:])
        preprocess(
            tyro.cli(PreprocessSettings, args=given, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
        )
    except (MegatronError, OSError) as error:
        sys.exit(f"preprocess_data: {error}")
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; run the same command to resume", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
