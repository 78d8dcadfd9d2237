"""``OnDevice``: construct a model on a device in a dtype."""

from typing import Any

import torch


class OnDevice:
    """Context in which tensors are constructed on ``device`` (such as ``meta``) in ``dtype``."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._context = torch.device(self.device)
            self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.enabled:
            self._context.__exit__(*exception)
            torch.set_default_dtype(self._before)
