"""Options of Megatron-Core under which a router would not take the experts that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nemo_sspo.errors import UserError


class _Option(NamedTuple):
    name: str
    refused: Callable[[Any], bool]
    allowed: str
    reason: str
    when: Callable[[Any], bool] = lambda config: True  # the whole configuration


def _sinkhorn(value: Any) -> bool:
    return "sinkhorn" in ([value] if isinstance(value, str) else value or [])


_OPTIONS = (
    _Option("moe_router_fusion", bool, "false", "the fused router chooses in one kernel and skips replay silently"),
    _Option("moe_router_load_balancing_type", _sinkhorn, "aux_loss or none", "its routing never asks for replay"),
    _Option("moe_router_force_load_balancing", bool, "false", "it puts random scores in place of the router's"),
    _Option(
        "moe_token_dispatcher_type",
        lambda value: value == "alltoall_seq",
        "alltoall or allgather",
        "with it a router chooses for the tokens of all tensor-parallel ranks, and is given the routes of its own only",
    ),
    _Option(  # Megatron-Core 0.16 refuses it by itself
        "moe_layer_recompute",
        bool,
        "false where recompute_granularity is full",
        "recomputing within recomputing calls a router a third time, and a micro-batch's routes are for two",
        when=lambda config: config.recompute_granularity == "full",
    ),
    _Option("moe_expert_capacity_factor", lambda value: value is not None, "null", "it drops some of the given routes"),
    _Option(
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "none",
        "a captured graph goes on with the routes that it was captured with",
    ),
    _Option("enable_cuda_graph", bool, "false", "a captured graph goes on with the routes that it was captured with"),
    _Option("external_cuda_graph", bool, "false", "a captured graph goes on with the routes that it was captured with"),
)


def check_options(config: Any) -> None:
    """Refuse a Megatron-Core ``TransformerConfig`` under which replay is skipped or undone.

    Raises:
        UserError: names the option, its value, what is allowed and why.
    """
    for name, refused, allowed, reason, when in _OPTIONS:
        value = getattr(config, name, None)
        if refused(value) and when(config):
            raise UserError(
                f"model.{name}: got {value!r}, allowed with model.grpo.routing_replay: {allowed}; {reason}; change it, "
                "or set model.grpo.routing_replay.mode=none"
            )
