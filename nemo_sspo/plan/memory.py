"""Bytes on the fullest GPU by kind, as `nemo_sspo.training.actor` holds them.

Training holds weights, gradients, optimizer, activations, logits and routes. Generation holds weights, gradients, what
is left of the optimizer, the key-value cache and, where an engine has weights of its own, those. A layout fits if the
larger of both, with a reserve, is at most the GPU's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.plan import activations
from nemo_sspo.plan.activations import Batch
from nemo_sspo.plan.layout import Layout
from nemo_sspo.plan.shape import Buffer, buffers, padded_vocab_size, parameter_count, stage_tensors

GIB = 2**30
RESERVE = 2 * GIB  # CUDA's context, NCCL's buffers: what a process of this kind holds before it allocates a tensor
FREE = 0.05  # share of the memory for fragments of the allocator and for short-lived tensors
KINDS = "weights gradients optimizer activations logits routes kv_cache generation_weights".split()
_GRADIENT, _MOMENTS, _MAIN = 4, 8, 4  # bytes a parameter: float32 gradients, two moments, main weights beside bf16
_TILE = 2**24  # logits at once: nemo_sspo/parallel/logprobs.py
_SAMPLING = 28  # bytes a logit: float32, its log-softmax, and float64 probabilities and their running sum
_FP8_COPIES = 2  # bytes a weight: Hopper's products take a copy and a transposed copy in 8 bits
_WIDE_ROUTES = 256  # more experts than this take two bytes: nemo_sspo/routing/routes.py


@dataclass(frozen=True)
class Term:
    """One summand: its kind, what it is, and its bytes."""

    kind: str
    text: str
    bytes: float


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank of a stage, by kind."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    routes: int
    kv_cache: int
    generation_weights: int
    offloaded: int  # of the optimizer's, during generation
    terms: tuple[Term, ...]

    @property
    def training(self) -> int:
        """While an optimizer step runs."""
        held = self.weights + self.gradients + self.optimizer
        return held + self.activations + self.logits + self.routes

    @property
    def generation(self) -> int:
        """While responses are sampled."""
        held = self.weights + self.gradients + self.optimizer - self.offloaded
        return held + self.kv_cache + self.generation_weights

    @property
    def peak(self) -> int:
        """The larger of both, without the reserve."""
        return max(self.training, self.generation)

    def fits(self, gpu_bytes: float) -> bool:
        """Whether the peak and the reserve are within a GPU's memory."""
        return self.peak + RESERVE <= (1 - FREE) * gpu_bytes

    def explain(self) -> str:
        """The terms, a line each, and both sums."""
        lines = [f"  {term.kind:<18} {term.bytes / GIB:10.3f} GiB  {term.text}" for term in self.terms if term.bytes]
        sums = [("training", self.training), ("generation", self.generation)]
        lines += [f"  {f'= {name}':<18} {size / GIB:10.3f} GiB" for name, size in sums]
        lines.append(f"  a GPU needs {RESERVE / GIB:g} GiB beside the larger one, and keeps {FREE:.0%} free")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Job:
    """What layouts are planned for."""

    model: ModelConfig
    vocab_size: int
    batch: Batch
    generation_tp: int | None = None  # GPUs that share an engine's own copy of the weights; None: it has none
    replay: bool = False


def layout_memory(job: Job, layout: Layout) -> Memory:
    """Of the stage with the highest peak: the first, or the last. Those between hold less than the first."""
    return max((stage_memory(job, layout, stage) for stage in {0, layout.pp - 1}), key=lambda one: one.peak)


def stage_memory(job: Job, layout: Layout, stage: int) -> Memory:
    """Of the fullest rank of one pipeline stage."""
    held = _buffers(job, dataclasses.replace(layout, micro_batch=1, recompute="none", fp8=False, offload=False), stage)
    terms = _state(job, layout, held)
    parts = activations.kept(job.model, layout, job.batch, stage)
    terms += [Term("activations", text, size) for text, size in parts]
    terms += [*_logits(job, layout, stage), *_routes(job, layout, stage), *_generation(job, layout)]
    sums = {kind: round(sum(term.bytes for term in terms if term.kind == kind)) for kind in KINDS}
    offloaded = sum(buffer.largest_part for buffer in held) * _MOMENTS if layout.offload else 0
    return Memory(stage=stage, **sums, offloaded=offloaded, terms=tuple(terms))


@lru_cache(maxsize=1024)
def _buffers(job: Job, layout: Layout, stage: int) -> tuple[Buffer, ...]:
    """The same for many layouts that differ in what is passed through the model only."""
    chunks = stage_tensors(job.model, job.vocab_size, layout, stage)
    return tuple(buffer for chunk in chunks for buffer in buffers(chunk, layout))


def _state(job: Job, layout: Layout, held: Sequence[Buffer]) -> list[Term]:
    parameters, padded = sum(b.parameters for b in held), sum(b.padded for b in held)
    part, element = sum(b.largest_part for b in held), job.batch.element
    of = f"of {parameters:,} parameters" + (f", {padded:,} with padding" if padded > parameters else "")
    terms = [
        Term("weights", f"{element} bytes {of}", padded * element),
        Term("gradients", f"float32, {of}", padded * _GRADIENT),
        Term("optimizer", f"two float32 moments of {part:,} parameters", part * _MOMENTS),
    ]
    if element < _GRADIENT:
        terms.append(Term("optimizer", f"float32 main weights of {part:,} parameters", part * _MAIN))
    if layout.fp8:
        terms.append(Term("weights", f"two 8-bit copies of {parameters:,} parameters", parameters * _FP8_COPIES))
    return terms


def _logits(job: Job, layout: Layout, stage: int) -> list[Term]:
    if stage < layout.pp - 1:
        return []
    hidden, vocab = job.model.hidden_size, padded_vocab_size(job.model, job.vocab_size) // layout.tp
    rows = max(layout.micro_batch * job.batch.response // layout.cp, 1)
    width = min(max(_TILE // max(rows, hidden), 1), vocab)
    return [
        Term("logits", f"two tiles of {rows:,} x {width:,} float32 logits", 2 * rows * width * 4),
        Term("logits", f"float32 gradient of {rows:,} rows of hidden states", rows * hidden * 4),
        Term("logits", f"gradient of {vocab:,} rows of the output layer", vocab * hidden * job.batch.element),
    ]


def _routes(job: Job, layout: Layout, stage: int) -> list[Term]:
    """What routers are given for one micro-batch: ids, and two flags a token. A rollout's wait on the host."""
    model = job.model
    if not job.replay or not model.num_moe_experts:
        return []
    tokens = layout.micro_batch * job.batch.sequence // (layout.cp * layout.tp)
    layers, size = model.num_layers // layout.pp, 1 if model.num_moe_experts <= _WIDE_ROUTES else 2
    passes = activations.in_flight(layout, job.batch.micro_batches(layout), stage)
    passes = -(-passes // layout.vpp)
    per_token = layers * ((model.moe_router_topk or 0) * size + 2)
    return [Term("routes", f"{tokens:,} tokens x {layers} layers x {passes} in flight", tokens * per_token * passes)]


def _generation(job: Job, layout: Layout) -> list[Term]:
    """The cache is for rows of full length; an engine that pages it needs less for shorter ones."""
    model, element = job.model, job.batch.element
    own = job.generation_tp is None
    tp, pp = (layout.tp, layout.pp) if own else (job.generation_tp or 1, 1)
    replicas = layout.dp if own else max(layout.gpus // tp, 1)
    rows = max(min(job.batch.rows, job.batch.rollout // replicas), 1)
    groups = max(model.num_query_groups // tp, 1)
    per_token = 2 * groups * model.kv_channels * element * model.num_layers // pp
    terms = [
        Term("kv_cache", f"{rows} rows of {job.batch.sequence:,} tokens", rows * job.batch.sequence * per_token),
        Term("kv_cache", "logits of sampling", rows * padded_vocab_size(model, job.vocab_size) * _SAMPLING),
    ]
    if not own:
        size = parameter_count(model, job.vocab_size) * element / tp
        terms.append(Term("generation_weights", f"the engine's copy, over {tp} GPUs", size))
    return terms
