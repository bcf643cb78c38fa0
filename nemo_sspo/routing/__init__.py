"""Routes, the experts that each token went to: recorded by one pass, replayed by another.

Between two passes over the same tokens a router may choose other experts, because kernels, batches or weights differ;
importance ratios then move for reasons that are not the policy. **R2** replays what the training engine chose in the
old-log-prob pass, **R3** what the generation engine chose (names of arXiv 2512.01374, "Stabilizing Reinforcement
Learning with LLMs"). Gate probabilities always come from the live router, so it keeps learning.
"""

from nemo_sspo.routing.replay import RoutingReplay, RoutingStats
from nemo_sspo.routing.routes import RouteFormat, gather_routes, load_imbalance

__all__ = ["RouteFormat", "RoutingReplay", "RoutingStats", "gather_routes", "load_imbalance"]
