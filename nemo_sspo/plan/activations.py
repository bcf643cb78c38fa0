"""Bytes that a forward pass keeps for the backward pass.

Two kinds of layers. ``local``: this package's own, with unfused attention and PyTorch's RMSNorm; their tensors were
listed with ``torch.autograd.graph.saved_tensors_hooks`` and are counted one by one. ``flash``: Transformer Engine's,
whose attention keeps no scores and whose norms keep their input only; derived, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.plan.layout import Layout

ATTENTION = ("flash", "local")
_CORE = "attention: core"  # what selective recompute does not keep
_FLOAT, _INT = 4, 8  # bytes of float32 and of int64
Part = tuple[str, float]  # what, and its bytes


@dataclass(frozen=True)
class Batch:
    """What is passed through the model: lengths in tokens, numbers of responses, bytes of an element."""

    sequence: int  # a padded response with its prompt
    response: int  # tokens of it that are trained on, at most
    step: int  # responses of an optimizer step, over all ranks
    rollout: int  # responses of a rollout, over all ranks
    rows: int  # responses that a rank generates together, at most
    element: int = 2
    attention: str = "flash"
    imbalance: float = 1.0  # tokens of the busiest rank's experts, over the mean

    def micro_batches(self, layout: Layout) -> int:
        """Of a rank, in one optimizer step."""
        return max(-(-self.step // (layout.dp * layout.micro_batch)), 1)


def kept(model: ModelConfig, layout: Layout, batch: Batch, stage: int) -> list[Part]:
    """Of all micro-batches that a stage has in flight at once, and of what it computes again for one of them."""
    layers = model.num_layers // (layout.pp * layout.vpp)
    passes = in_flight(layout, batch.micro_batches(layout), stage)
    first, last = stage == 0, stage == layout.pp - 1
    parts = [
        (f"{name} x {layers} layers x {passes} passes in flight", size * passes)
        for name, size in _chunk(model, layout, batch, layers)
    ]
    if first:
        ids = layout.micro_batch * batch.sequence // layout.cp * _INT
        parts.append(("token ids of the embedding", ids * min(layout.pp, batch.micro_batches(layout))))
    head, again = _total(_head(model, layout, batch)) if last else 0.0, _again(model, layout, batch)
    # The head's are gone before anything is computed again.
    if head >= again:
        return [*parts, ("final norm, hidden states and their response rows", head)]
    return [*parts, ("computed again in the backward pass, one block at a time", again)]


def in_flight(layout: Layout, micro_batches: int, stage: int) -> int:
    """Forward passes of a model chunk whose backward pass has yet to come (Megatron-Core's schedules.py)."""
    behind = layout.pp - stage - 1
    if layout.vpp == 1:
        return min(behind + 1, micro_batches)
    return min(2 * behind + (layout.vpp - 1) * layout.pp + 1, micro_batches * layout.vpp)


def layer_bytes(model: ModelConfig, layout: Layout, batch: Batch) -> float:
    """Of one layer and one micro-batch, with nothing computed again."""
    return _total(_layer(model, layout, batch))


def _chunk(model: ModelConfig, layout: Layout, batch: Batch, layers: int) -> Iterator[Part]:
    """One pass through one model chunk."""
    if layout.recompute == "full":
        uniform, size = layout.recompute_method == "uniform", layout.recompute_layers
        blocks, whole = (-(-layers // size), 0) if uniform else (size, layers - size)
        yield "inputs of the blocks computed again", blocks * _split(layout, batch) * model.hidden_size * batch.element
        layers = whole
    for name, size in _layer(model, layout, batch):
        if layers and not (layout.recompute == "selective" and name.startswith(_CORE)):
            yield name, layers * size
    if layout.recompute == "selective":
        # Query and key turned by their positions, and the projection's output, of which the values are a view.
        query, groups = _widths(model, layout)
        width = query + groups + (0 if _projection_is_kept(model, batch) else query + 2 * groups)
        yield "attention: inputs of its core", layers * _tokens(layout, batch) * width * batch.element


def _again(model: ModelConfig, layout: Layout, batch: Batch) -> float:
    """What recomputing one block adds to what was kept, once the backward pass has freed what comes after the block."""
    if layout.recompute == "none":
        return 0.0
    layer = dict(_layer(model, layout, batch))
    if layout.recompute == "selective":
        core = sum(size for name, size in layer.items() if name.startswith(_CORE))
        after = sum(size for name, size in layer.items() if not name.startswith("attention")) - layer["norms"] / 2
        return max(core - after, 0.0)
    if layout.recompute_method == "uniform":
        return layout.recompute_layers * sum(layer.values())
    later = model.num_layers // (layout.pp * layout.vpp) - layout.recompute_layers  # those are kept whole, and freed
    return max(1 - later, 0) * sum(layer.values())


def _layer(model: ModelConfig, layout: Layout, batch: Batch) -> Iterator[Part]:
    hidden, split = model.hidden_size, _split(layout, batch)
    yield "norms", split * 2 * _norm(hidden, batch)
    yield from _attention(model, layout, batch)
    if model.num_moe_experts is not None:
        yield from _router_and_experts(model, layout, batch)
        return
    ffn, linear = (model.ffn_hidden_size or 0) // layout.tp, _linear(layout, batch)
    yield "feed-forward: input", split * hidden * linear
    yield "feed-forward: gate, value and products", _tokens(layout, batch) * ffn * (4 * batch.element + linear)


def _attention(model: ModelConfig, layout: Layout, batch: Batch) -> Iterator[Part]:
    tokens, element = _tokens(layout, batch), batch.element
    query, groups = _widths(model, layout)
    sequence, heads = batch.sequence / layout.cp, model.num_attention_heads // layout.tp
    yield "attention: input", _split(layout, batch) * model.hidden_size * _linear(layout, batch)
    yield "attention: output", tokens * query * _linear(layout, batch)
    if batch.attention == "flash":
        yield f"{_CORE}, query, key, value", tokens * (2 * query + 3 * groups) * element
        yield f"{_CORE}, log-sum-exp", tokens * heads * _FLOAT
        return
    if model.qk_layernorm:
        widths = 2 * query + 2 * groups
        widths += query + groups if _projection_is_kept(model, batch) else 0
        norms = (heads + groups // model.kv_channels) * _FLOAT
        yield "attention: norms of query and key", tokens * (widths * _FLOAT + norms)
    yield "attention: rotary angles", 4 * sequence * model.kv_channels * element
    yield f"{_CORE}, query, key, value, each for all heads", tokens * 3 * query * element
    scores = layout.micro_batch * heads * sequence * batch.sequence
    # The softmax is in float32, and its product with the values takes a copy in bf16.
    yield f"{_CORE}, scores", scores * (_FLOAT if element == _FLOAT else _FLOAT + element)
    yield f"{_CORE}, mask", sequence * batch.sequence


def _projection_is_kept(model: ModelConfig, batch: Batch) -> bool:
    """In float32 the key's norm keeps a view of the projection's output, in bf16 a copy in float32."""
    return batch.attention == "local" and model.qk_layernorm and batch.element == _FLOAT


def _router_and_experts(model: ModelConfig, layout: Layout, batch: Batch) -> Iterator[Part]:
    split, hidden, linear = _split(layout, batch), model.hidden_size, _linear(layout, batch)
    experts, topk = model.num_moe_experts or 0, model.moe_router_topk or 0
    yield "router: input", split * hidden * batch.element
    # Chosen ids and their order as int64, probabilities of the chosen and of all in float32, the map of all as bool.
    yield "router: choices", split * (topk * (2 * _INT + _FLOAT) + experts * (_FLOAT + 1))
    # Each token goes to `topk` experts; with experts split over ranks, each of those sees the tokens of all.
    rows = split * topk * layout.etp * batch.imbalance
    ffn = (model.moe_ffn_hidden_size or 0) // layout.etp
    yield "experts: input", rows * (hidden * linear + _FLOAT)
    yield "experts: gate, value and products", rows * ffn * (5 * batch.element + linear)


def _head(model: ModelConfig, layout: Layout, batch: Batch) -> Iterator[Part]:
    """What the last stage keeps besides its layers; the hidden states are gathered under sequence parallelism."""
    responses = layout.micro_batch * batch.response / layout.cp
    yield "norm", _split(layout, batch) * _norm(model.hidden_size, batch)
    yield "hidden states", _tokens(layout, batch) * model.hidden_size * batch.element
    yield "response rows", responses * (model.hidden_size * batch.element + 2 * _INT + 4 * _FLOAT)


def _norm(width: int, batch: Batch) -> int:
    """Of one row: PyTorch's RMSNorm keeps its input and the normalised input in float32, and the root mean square."""
    return (2 * _FLOAT if batch.attention == "local" else batch.element) * width + _FLOAT


def _widths(model: ModelConfig, layout: Layout) -> tuple[int, int]:
    """Of a token's queries, and of its keys (or values), on a rank."""
    return tuple(  # type: ignore[return-value]
        heads // layout.tp * model.kv_channels for heads in (model.num_attention_heads, model.num_query_groups)
    )


def _linear(layout: Layout, batch: Batch) -> int:
    """Bytes of an element of a matrix product's input as it is kept: FP8 kernels keep the 8-bit one."""
    return 1 if layout.fp8 else batch.element


def _tokens(layout: Layout, batch: Batch) -> float:
    """Of a micro-batch, on a rank that is not under sequence parallelism."""
    return layout.micro_batch * batch.sequence / layout.cp


def _split(layout: Layout, batch: Batch) -> float:
    """Of a micro-batch, where sequence parallelism splits them over the tensor-parallel ranks."""
    return _tokens(layout, batch) / layout.tp


def _total(parts: Iterator[Part]) -> float:
    return sum(size for _, size in parts)
