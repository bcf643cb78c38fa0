"""How much PyTorch's CPU allocator had out at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most bytes that `action` held at a time, above those held before it.

    A file that is mapped counts as if it were read.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    allocated = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak
