"""Convert text files to token files: workers tokenize; one process reads compressed files and writes the output."""

from megatron_core.preprocess.inputs import find_inputs
from megatron_core.preprocess.job import preprocess
from megatron_core.preprocess.readers import read_texts
from megatron_core.preprocess.settings import Limits, PreprocessSettings
