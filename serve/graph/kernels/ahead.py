"""Kernels that are launched while the one before still runs (programmatic dependent launch, sm_90 and later)."""

import triton
import triton.language as tl


@triton.jit
def take_turn(AHEAD: tl.constexpr):
    """Wait until the kernel before has ended, and let the next one be launched.

    With AHEAD it is the first statement of every kernel, also of one that finds nothing to do: a kernel knows that the
    ones before it have ended because the last of them has, and that one waited in turn. What is read or written
    before, weights too, is not ordered. Without, kernels start one after the other by themselves.
    """
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
