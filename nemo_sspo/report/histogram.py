"""The fixed bins over the log-ratio that every run counts in, so that counts add up over steps, ranks and runs."""

from __future__ import annotations

import torch

_HALF_WIDTH = 0.01
_BINS_A_SIDE = 100

LOG_RATIO_BINS: tuple[float, ...] = tuple(
    round((2 * k - 1) * _HALF_WIDTH, 6) for k in range(-_BINS_A_SIDE, _BINS_A_SIDE + 2)
)
"""The 202 edges -2.01, -1.99, ..., 2.01. The middle bin is centred on zero, where a fresh policy puts every token."""


def log_ratio_histogram(log_ratio: torch.Tensor) -> list[int]:
    """Count log-ratios in `LOG_RATIO_BINS`.

    Args:
        log_ratio: any shape; log of the importance ratio, response tokens only (select by the mask first).

    Returns:
        ``len(LOG_RATIO_BINS) + 1`` counts: below the first edge, each bin [edge, next edge), at or above the last edge.
        NaN is not counted. Counts of several ranks or steps add up element by element.
    """
    values = log_ratio.detach().flatten()
    values = values[~values.isnan()].double()
    edges = torch.tensor(LOG_RATIO_BINS, dtype=torch.float64, device=values.device)
    return torch.bincount(torch.bucketize(values, edges, right=True), minlength=len(LOG_RATIO_BINS) + 1).tolist()
