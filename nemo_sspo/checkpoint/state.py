"""What a checkpoint holds of the policy and its optimizer, by global names, and how it gets back under any layout.

Weights are under their own names, Adam's moments under ``optimizer.state.exp_avg.NAME`` and ``...exp_avg_sq.NAME``, and
bfloat16 training's float32 weights under ``optimizer.state.fp32_param.NAME``: alike for Megatron-Core's three kinds of
optimizer (float32, mixed precision, distributed), chained for experts or not. All else of an optimizer's state follows
from the config and from the number of its steps, so it is not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch.distributed.checkpoint.api import CheckpointException

from nemo_sspo.checkpoint.folder import SHARDS, Checkpoint
from nemo_sspo.errors import UserError, some
from nemo_sspo.model import Policy
from nemo_sspo.model.weights import put_weights, shards
from nemo_sspo.parallel.ranks import world
from nemo_sspo.parallel.reductions import all_gather_list

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_MAIN_PARAM = "optimizer.state.fp32_param."


def sharded_state(policy: Policy, optimizer: Any | None) -> dict[str, Any]:
    """What is written: the weights and, unless None, the optimizer's tensors."""
    state = {"weights": policy.sharded_weights()}
    if optimizer is not None:
        sharded, _ = _split(policy, optimizer, is_loading=False)
        if not policy.config.bf16:  # float32 weights are their own main weights
            sharded = _without_main_params(sharded)
        state["optimizer"] = sharded
    return state


def load_weights(checkpoint: Checkpoint, policy: Policy, shape: dict[str, Any]) -> None:
    """Put a checkpoint's weights into `policy`, every one of them or none. A collective.

    Raises:
        UserError: the checkpoint is of another model (names the keys that differ), a weight is missing or left over,
            or its files can't be read.
    """
    _check_shape(checkpoint, shape)
    loaded = _load(checkpoint, {"weights": policy.sharded_weights()}, ignore="optimizer.")
    put_weights(policy.chunks, loaded["weights"])


def load_training_state(checkpoint: Checkpoint, policy: Policy, optimizer: Any, shape: dict[str, Any]) -> None:
    """Put a checkpoint's weights and optimizer state back, whatever layout wrote them. A collective.

    Raises:
        UserError: as `load_weights`; also for a tensor of the optimizer's state.
    """
    _check_shape(checkpoint, shape)
    sharded, rest = _split(policy, optimizer, is_loading=True)
    if not policy.config.bf16:
        _alias_main_params(sharded)
    loaded = _load(checkpoint, {"weights": policy.sharded_weights(), "optimizer": sharded}, ignore=None)
    put_weights(policy.chunks, loaded["weights"])
    optimizer.load_state_dict(_unwrapped(merge(rest, loaded["optimizer"]), checkpoint.optimizer_steps))
    _set_steps(optimizer, checkpoint.optimizer_steps)


def _split(policy: Policy, optimizer: Any, is_loading: bool) -> tuple[Any, Any]:
    """An optimizer's sharded state dict: its tensors, and everything else."""
    if is_loading:
        _make_room(optimizer)
    state: Any = optimizer.sharded_state_dict(policy.sharded_weights(), is_loading=is_loading, metadata=dict(_METADATA))
    if "optimizer" in state or "state" in state:  # a single one; several come numbered
        state = {0: state}
    sharded, rest = extract_sharded_tensors_and_factories(state)
    for value in nested_values(sharded):
        value.key = value.key.replace("optimizer.state.param.", _MAIN_PARAM)  # the distributed optimizer's name for it
    return sharded, rest


def _make_room(optimizer: Any) -> None:
    """Moments to be read into, for an optimizer that has made no step."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn(part.optimizer, part.config)
    _set_steps(optimizer, 0)


def _set_steps(optimizer: Any, steps: int) -> None:
    """The number of steps that the moments are of. PyTorch's Adam counts with a tensor of each parameter's own, which
    Megatron-Core's loading may leave shared among all, so that one step counts as many."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(steps))


def _unwrapped(state: Any, steps: int) -> Any:
    """Optimizer state dicts for ``load_state_dict``."""
    for part in state.values():
        inner = part.get("optimizer", part)
        if "param_state" not in part:
            inner["state"]["common_step"] = torch.tensor(float(steps))
        for group in inner["param_groups"]:
            if isinstance(group.get("params"), LocalNonpersistentObject):
                group["params"] = group["params"].unwrap()
            if "param_state" in part or "step" in group:
                group["step"] = steps
    return state[0] if len(state) == 1 else state


def _is_main_param(value: Any) -> bool:
    return isinstance(value, ShardedTensor | ShardedTensorFactory) and value.key.startswith(_MAIN_PARAM)


def _without_main_params(sharded: Any) -> Any:
    if isinstance(sharded, dict):
        return {k: _without_main_params(v) for k, v in sharded.items() if not _is_main_param(v)}
    return sharded


def _alias_main_params(sharded: Any) -> None:
    """Let float32 main weights be read from the weights themselves."""
    for value in nested_values(sharded):
        if _is_main_param(value):
            value.key = value.key.removeprefix(_MAIN_PARAM)


def _check_shape(checkpoint: Checkpoint, shape: dict[str, Any]) -> None:
    changed = [key for key in {**checkpoint.shape, **shape} if checkpoint.shape.get(key) != shape.get(key)]
    if changed:
        differences = ", ".join(f"{key} was {checkpoint.shape.get(key)} and is {shape.get(key)}" for key in changed)
        raise UserError(
            f"{checkpoint.path}: the checkpoint is of another model: {differences}; set them back, or choose another "
            "exp_manager.explicit_log_dir"
        )


def _load(checkpoint: Checkpoint, wanted: dict[str, Any], ignore: str | None) -> Any:
    """Megatron-Core's load, which writes into the tensors in `wanted`; before that, every name that has no counterpart
    is an error."""
    folder = checkpoint.path / SHARDS
    stored = set(_read(folder, lambda: dist_checkpointing.load_tensors_metadata(str(folder))))
    asked = set(all_gather_list([shard.key for shard in shards(wanted)], world()))
    left_over = sorted(key for key in stored - asked if ignore is None or not key.startswith(ignore))
    if left_over:
        raise UserError(f"{folder}: {some(left_over)} in the checkpoint, but not in this model or optimizer")
    if asked - stored:
        missing = sorted(asked - stored)
        raise UserError(f"{folder}: {some(missing)} in this model or optimizer, but not in the checkpoint")
    return _read(folder, lambda: dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False))


def _read(folder: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (Exception, CheckpointException) as error:  # what a damaged or foreign file provokes is anyone's guess
        cause = error
        if isinstance(error, CheckpointException) and error.failures:  # rank -> its exception and traceback
            cause = next(iter(error.failures.values()))[0]
        why = f"{type(cause).__name__}: {cause}".splitlines()[0]
        raise UserError(
            f"{folder}: can't be read ({why}); delete that checkpoint folder to use the one before"
        ) from error
