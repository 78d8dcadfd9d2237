"""From text files to token files: worker processes tokenize, one process reads packed files and writes the output."""

from megatron_core.preprocess.inputs import find_inputs
from megatron_core.preprocess.job import preprocess
from megatron_core.preprocess.readers import read_texts
from megatron_core.preprocess.settings import Limits, PreprocessSettings
