"""Where tensors live: what ``device=`` means on this machine."""

import os

from .config import Device
from .errors import ConfigError


def choose_device(device: Device) -> str:
    """``cpu`` or ``cuda:N``. Raises ConfigError when device=cuda finds none."""
    import torch

    available = torch.cuda.is_available()
    if device is Device.cuda and not available:
        raise ConfigError("device=cuda, but torch sees no CUDA device; use device=auto or device=cpu")
    if device is Device.cpu or not available:
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
