"""What the planner says a rank holds, against what it holds: in every layout, after an optimizer step.

Activations are the storages that autograd holds for the backward pass, the most at any time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nemo_sspo.config.load import load_config
from nemo_sspo.plan import Job, stage_memory
from nemo_sspo.plan import Layout as PlannedLayout
from nemo_sspo.plan.activations import Batch
from tests.distributed.launch import each, run_ranks
from tests.distributed.layouts import LAYOUTS, Layout

pytestmark = pytest.mark.distributed

# How far the planned bytes may be from those held.
LIMITS = {"weights": 0.01, "gradients": 0.01, "optimizer": 0.01, "activations": 0.20}
VOCAB, MICRO_BATCH, ROWS = 96, 2, 8
MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 24,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 48,
}


class Case(NamedTuple):
    """The length of responses with their prompts, and overrides of the model."""

    sequence: int = 48
    overrides: tuple[str, ...] = ()


def _recompute(granularity: str, method: str = "null", layers: str = "null") -> tuple[str, ...]:
    keys = {"granularity": granularity, "method": method, "num_layers": layers}
    return tuple(f"model.activations_checkpoint_{key}={value}" for key, value in keys.items())


BF16 = "trainer.precision=bf16"
# The shape of Qwen2.5.
DENSE = tuple(f"model.{key}=null" for key in ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"))
DENSE = (*DENSE, "model.ffn_hidden_size=112", "model.qk_layernorm=false", "model.add_qkv_bias=true")
TIED = "model.share_embeddings_and_output_weights=true"
WITH_EXPERTS = {
    # Attention's scores are a small part at one length, most at the other.
    "short": Case(24),
    "long": Case(160),
    "selective": Case(48, _recompute("selective")),
    "uniform": Case(48, _recompute("full", "uniform", "1")),
    "block": Case(48, _recompute("full", "block", "1")),
    "bf16": Case(48, (BF16,)),
    "bf16_selective": Case(48, (BF16, *_recompute("selective"))),
}
WITHOUT = {"dense": Case(48, DENSE), "dense_tied": Case(48, (*DENSE, TIED)), "dense_bf16": Case(48, (*DENSE, BF16))}
MORE = {
    "single": WITH_EXPERTS | WITHOUT,
    "dp2_distopt": {"bf16": Case(48, (BF16,)), **WITHOUT},
    "tp2_sp": {"long": WITH_EXPERTS["long"], **WITHOUT},
    "pp2": WITHOUT,
    "tp2_ep2_pp2": WITH_EXPERTS,
}


RUNS = {(layout, "default"): (LAYOUTS[layout], Case()) for layout in LAYOUTS} | {
    (layout, name): (LAYOUTS[layout], case) for layout, cases in MORE.items() for name, case in cases.items()
}


def config_of(layout: Layout, case: Case) -> Any:
    sizes = MODEL | {"encoder_seq_length": case.sequence, "micro_batch_size": MICRO_BATCH}
    keys = [f"model.{key}={value}" for key, value in sizes.items()]
    return load_config("tiny_moe_cpu", [*keys, *layout.overrides, *case.overrides])


def planned(layout: Layout, case: Case) -> list[Any]:
    """The planner's bytes of every pipeline stage."""
    config, length = config_of(layout, case), case.sequence
    config.model.optim.name = "mcore_distributed_optim" if layout.distributed_optimizer else "adam"
    sizes = {"sequence": length, "response": length - length // 4, "step": ROWS, "rollout": ROWS, "rows": 1}
    batch = Batch(**sizes, element=2 if BF16 in case.overrides else 4, attention="local")
    plan = PlannedLayout.of(config, layout.processes)
    return [stage_memory(Job(config.model, VOCAB, batch), plan, stage) for stage in range(plan.pp)]


def deviations(layout: Layout, case: Case, ranks: list[dict[str, int]]) -> dict[str, float]:
    """By kind and stage, how far the planned bytes are from those on the stage's fullest rank."""
    found = {}
    for stage, plan in enumerate(planned(layout, case)):
        for kind in LIMITS:
            most = max(rank[kind] for rank in ranks if rank["stage"] == stage)
            found[f"{kind} of stage {stage}"] = getattr(plan, kind) / most - 1
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Callable[[str, str], list[dict[str, int]]]:
    """What every rank of a layout holds in a case."""

    @cache
    def of_size(size: int) -> list[dict[tuple[str, str], dict[str, int]]]:
        runs = {name: run for name, run in RUNS.items() if run[0].processes == size}
        return run_ranks(held, size, tmp_path_factory.mktemp("ranks"), runs, limit=300)

    return lambda layout, case: [by_name[layout, case] for by_name in of_size(LAYOUTS[layout].processes)]


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_planned_bytes_are_those_held(results, layout, name):
    ranks = results(layout, name)
    assert not any(rank["left"] for rank in ranks)  # all that was counted in was counted out
    found = deviations(*RUNS[layout, name], ranks)
    print(", ".join(f"{what} {by:+.2%}" for what, by in found.items()))
    assert [f"{what} {by:+.2%}" for what, by in found.items() if abs(by) > LIMITS[what.split()[0]]] == []


# -- on every rank ------------------------------------------------------------------------------------------------


def held(rank: int, size: int, runs: dict[tuple[str, str], tuple[Layout, Case]]) -> dict[tuple[str, str], Any]:
    return each(runs, _held)


def _held(layout: Layout, case: Case) -> dict[str, int]:
    """Bytes of storages by kind after a step, the most that a second step keeps for its backward pass; the stage."""
    from nemo_sspo.training.distributed import model_parallel_groups
    from tests.benchmarks.layouts import full_batch, new_actor, step

    config = config_of(layout, case)
    with model_parallel_groups(config.model) as groups:
        actor = new_actor(config, VOCAB, groups, MICRO_BATCH, layout)
        batch = full_batch(ROWS, case.sequence, VOCAB)
        step(actor, batch)
        kept = Kept({parameter.untyped_storage().data_ptr() for parameter in actor._parameters()})
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            step(actor, batch)
        activations = {"activations": kept.most, "left": kept.now, "stage": groups.pp.rank()}
        return state_by_kind(actor) | activations


def state_by_kind(actor: Any) -> dict[str, int]:
    """Each storage once, under the first kind that has it."""
    weights, gradients, optimizer = [], [], []
    for piece in actor.chunks:
        weights += piece.parameters()
        for buffer in piece.buffers + piece.expert_parallel_buffers:
            gradients.append(buffer.grad_data)
            weights += [] if buffer.param_data is None else [buffer.param_data]
    for part in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        if part.optimizer is not None:  # a stage may have no experts
            optimizer += chain.from_iterable(group["params"] for group in part.optimizer.param_groups)
            states = chain.from_iterable(state.values() for state in part.optimizer.state.values())
            optimizer += [value for value in states if isinstance(value, Tensor) and value.dim()]  # not step counts
    seen: set[int] = set()
    kinds = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return {kind: sum(_new_bytes(tensor, seen) for tensor in tensors) for kind, tensors in kinds.items()}


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    storage = tensor.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


class Kept:
    """Bytes of the storages that autograd holds for backward passes: now, and at most."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters, self.users = parameters, dict[int, int]()
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> _Holder | Tensor:
        return tensor if tensor.untyped_storage().data_ptr() in self.parameters else _Holder(tensor, self)

    def unpack(self, packed: _Holder | Tensor) -> Tensor:
        return packed.tensor if isinstance(packed, _Holder) else packed

    def change(self, storage: torch.UntypedStorage, by: int) -> None:
        place = storage.data_ptr()
        before = self.users.get(place, 0)
        self.users[place] = before + by
        if 0 in (before, before + by):
            self.now += by * storage.nbytes()
            self.most = max(self.most, self.now)


class _Holder:
    """A saved tensor: autograd drops it when its backward pass is done."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor, self._kept, self._storage = tensor, kept, tensor.untyped_storage()
        kept.change(self._storage, 1)

    def __del__(self) -> None:
        self._kept.change(self._storage, -1)
