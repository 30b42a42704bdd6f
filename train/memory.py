"""Peak memory of this process."""

import resource
import sys

import torch


def peak_memory_gib(device: torch.device) -> float:
    """GiB: what torch held at most on a GPU, or the process's largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
