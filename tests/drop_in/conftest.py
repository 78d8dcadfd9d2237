"""Make the modules of ``named_modules.yaml`` importable, whichever test is collected first."""

import importlib
import os
from unittest import mock

# Otherwise the workers of a parallel run inherit PYTHONPATH, and with it the programs that other tests start.
with mock.patch.dict(os.environ):
    importlib.import_module("megatron_core.drop_in")
