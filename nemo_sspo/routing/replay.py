"""All routers of one policy on this rank: what they did is recorded, what they are to do is handed to them.

Within a pass (`RoutingReplay.taking_part`) `feed` comes before the forward pass of each micro-batch through each model
chunk, and then `routes` (recorded) or `stats` (replayed). Layers are known by their global numbers: dense layers in
between, pipeline stages and virtual stages don't shift anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_sspo.compat import megatron_routing
from nemo_sspo.errors import RunError, UserError
from nemo_sspo.parallel.ranks import world
from nemo_sspo.parallel.reductions import Group, all_gather_rows, all_reduce
from nemo_sspo.routing.hook import Action, RouterHook, Target
from nemo_sspo.routing.options import check_options
from nemo_sspo.routing.routes import RouteFormat, from_bytes, to_bytes
from nemo_sspo.routing.slots import Slots


@dataclass(frozen=True)
class RoutingStats:
    """What the routers of all ranks did in one replaying pass, counted over the tokens that a loss depends on."""

    replayed_fraction: float  # (token, layer) pairs that took the experts they were given; 1.0: all
    mismatch_by_layer: list[float]  # [L] share of the given experts that the live router would not have chosen

    @property
    def mismatch_rate(self) -> float:
        """Their mean."""
        return sum(self.mismatch_by_layer) / len(self.mismatch_by_layer)


class RoutingReplay:
    """Hooks at the routers of `chunks`, this rank's part of a policy; ``config`` is Megatron-Core's.

    Nothing of it outlives the model: the hooks hang on its routers, and no list of the process knows them.

    Raises:
        UserError: the model has no experts, or an option of `config` makes Megatron-Core skip or undo replay.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, groups: Any) -> None:
        if not config.num_moe_experts:
            raise UserError(
                "model.grpo.routing_replay.mode: got a model without experts, with nothing to replay; set it to none"
            )
        check_options(config)
        self.form = RouteFormat.of(config)
        self._chunks, self._groups = list(chunks), groups
        self._sequence_parallel = config.sequence_parallel
        self._by_chunk: list[list[RouterHook]] = []
        for chunk in self._chunks:
            hooks = []
            for layer, router in megatron_routing.routers(chunk):
                hooks.append(RouterHook(layer, self.form.layers.index(layer)))
                megatron_routing.attach(router, hooks[-1])
            self._by_chunk.append(hooks)
        self._begin(Action.NONE)

    @contextmanager
    def taking_part(self, action: Action, training: bool = False) -> Iterator[RoutingReplay]:
        """One pass; `training` says that backward follows. Else the routers route as if there were no replay."""
        self._begin(action, training)
        try:
            yield self
        finally:
            self._begin(Action.NONE)

    def _begin(self, action: Action, training: bool = False) -> None:
        self._micro_batches: list[Slots] = []
        self._due = torch.zeros(len(self.form.layers), dtype=torch.int64)
        for hook in self.hooks():
            hook.begin(action, training)
        self._action = action

    @property
    def active(self) -> bool:
        """Whether a pass has begun that `feed` is wanted for."""
        return self._action is not Action.NONE

    def feed(self, chunk: Any, slots: Slots, routes: Sequence[Tensor] | None = None) -> None:
        """Call it right before `chunk` sees a micro-batch: where its tokens lie, and their routes in storage.

        Sequence parallelism takes its part of both by itself.
        """
        number = next(i for i, known in enumerate(self._chunks) if known is chunk)
        if number == 0:
            self._micro_batches.append(slots)
        hooks = self._by_chunk[number]
        if self._action is not Action.REPLAY or not hooks:
            return
        if routes is None:
            raise RunError("routing replay: the micro-batch has no routes; its batch lost them on the way to the actor")
        places = [hook.place for hook in hooks]
        device = next(chunk.parameters()).device
        ids = self._part(slots.place(routes, self.form, places)).transpose(0, 1).contiguous()
        matter, routed = self._part(slots.matter()), self.form.has_route(ids)
        self._due[places] += int(matter.sum())
        by_layer = (values.to(device) for values in (ids, routed, routed & matter))
        for hook, *target in zip(hooks, *by_layer, strict=True):
            hook.target = Target(*target)

    def stats(self) -> RoutingStats:
        """What the pass did, the same on every rank. A collective.

        Raises:
            RunError: on every rank alike, if a router did not take part in every forward pass; it names the layers.
        """
        counts = torch.zeros(len(self.form.layers), 5, dtype=torch.int64)  # routers, failed, due, replayed, differing
        counts[:, 2] = self._due
        for chunk, hooks in zip(self._chunks, self._by_chunk, strict=True):
            by_layer = {hook.layer: hook for hook in hooks}
            for layer, router in megatron_routing.routers(chunk):  # those that live now, not those of the beginning
                hook = by_layer.get(layer)
                place = self.form.layers.index(layer)
                if hook is None or megatron_routing.attached(router) is not hook:
                    counts[place, 1] += 1
                    continue
                failed = hook.calls != len(self._micro_batches) or hook.unfinished
                counts[place] += torch.tensor([1, int(failed), 0, int(hook.replayed), int(hook.differing)])
        counts = all_reduce(counts.to(_device(self._chunks)), world()).cpu()
        lost = [layer for layer, (found, failed) in zip(self.form.layers, counts[:, :2].tolist(), strict=True)
                if failed or not found]  # fmt: skip
        if lost:
            raise RunError(
                f"routing replay: the routers of layers {', '.join(map(str, lost))} did not replay in every forward "
                "pass; another library took their place, or a forward pass went around them"
            )
        due, replayed, differing = counts[:, 2:].double().unbind(1)
        return RoutingStats(
            replayed_fraction=float(replayed.sum() / due.sum().clamp(min=1)),
            mismatch_by_layer=(differing / (replayed * self.form.topk).clamp(min=1)).tolist(),
        )

    def routes(self) -> list[Tensor]:
        """What was recorded, in storage, ``[tokens, L, K]`` a response of this data-parallel rank. A collective."""
        hooks = self.hooks()
        short = [hook.layer for hook in hooks if len(hook.recorded) != len(self._micro_batches)]
        if short:
            raise RunError(f"routing replay: the routers of layers {', '.join(map(str, short))} did not record")
        share = self._groups.tp.size() if self._sequence_parallel else 1
        parts = [
            self._stack([hook.recorded[i] for hook in hooks], slots.total // share)
            for i, slots in enumerate(self._micro_batches)
        ]
        whole = self._whole_sequences(parts)
        tokens = torch.cat([slots.take(part) for slots, part in zip(self._micro_batches, whole, strict=True)])
        lengths = [length for slots in self._micro_batches for length in slots.lengths]
        return [routes.clone() for routes in self.all_layers(tokens).cpu().split(lengths)]

    def take(self, slots: int) -> Tensor:
        """What was recorded since the last call, of this rank's layers only: ``[slots, layers, K]`` in storage."""
        hooks = self.hooks()
        recorded = self._stack([torch.cat(hook.recorded) for hook in hooks], slots)
        for hook in hooks:
            hook.recorded.clear()
        return recorded

    def all_layers(self, ids: Tensor) -> Tensor:
        """``[tokens, layers of this rank, K]`` -> ``[tokens, L, K]``, in the order of the layers. A collective."""
        pp: Group = self._groups.pp
        places = torch.tensor([hook.place for hook in self.hooks()], dtype=torch.int64)
        if pp.size() > 1:
            ids = from_bytes(all_gather_rows(to_bytes(ids.transpose(0, 1)), pp), ids.dtype).transpose(0, 1)
            places = all_gather_rows(places, pp)
        return ids[:, places.argsort().to(ids.device)]

    def hooks(self) -> list[RouterHook]:
        """Of all routers on this rank, model chunk by model chunk."""
        return [hook for hooks in self._by_chunk for hook in hooks]

    def _stack(self, by_layer: Sequence[Tensor], slots: int) -> Tensor:
        if not by_layer:  # a pipeline stage may have no experts
            return torch.zeros(slots, 0, self.form.topk, dtype=self.form.dtype)
        return torch.stack(list(by_layer), 1).to(self.form.dtype)

    def _part(self, values: Tensor) -> Tensor:
        tp: Group = self._groups.tp
        return values.chunk(tp.size())[tp.rank()] if self._sequence_parallel else values

    def _whole_sequences(self, parts: list[Tensor]) -> list[Tensor]:
        """Undo sequence parallelism: this rank's part of each micro-batch -> all of its slots."""
        tp: Group = self._groups.tp
        if not self._sequence_parallel:
            return parts
        sizes = [len(part) for part in parts]
        everyone = from_bytes(all_gather_rows(to_bytes(torch.cat(parts)), tp), self.form.dtype)
        by_rank = everyone.view(tp.size(), sum(sizes), *everyone.shape[1:])
        return [piece.flatten(0, 1) for piece in by_rank.split(sizes, dim=1)]


def _device(chunks: Sequence[Any]) -> torch.device:
    return next(chunks[0].parameters()).device
