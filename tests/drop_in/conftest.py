"""Make the modules of ``named_modules.yaml`` importable, whichever test is collected first."""

import importlib

importlib.import_module("megatron_core.drop_in")
