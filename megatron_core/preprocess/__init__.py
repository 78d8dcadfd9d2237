"""Convert text files to token files: workers tokenize; one process reads compressed files and writes the output.

Names are imported on first use, so that programs that only write token files do not load it all; see ``__init__.pyi``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
