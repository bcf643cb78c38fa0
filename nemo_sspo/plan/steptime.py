"""A first-order estimate of the seconds that one optimizer step takes: sums of work over rate, nothing overlapped."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_sspo.plan import activations, rates
from nemo_sspo.plan.layout import Layout
from nemo_sspo.plan.memory import Job, Memory
from nemo_sspo.plan.rates import Gpu
from nemo_sspo.plan.shape import active_parameters, expert_parameters, padded_vocab_size

_FORWARD_AND_BACKWARD = 3  # the backward pass has two products for each of the forward pass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest stage, by what they go to."""

    products: float  # matrix products, recomputation included
    memory: float  # kernels that wait for memory, the optimizer's included
    tensor: float  # collectives of tensor parallelism
    expert: float  # all-to-alls of expert parallelism
    data: float  # reduction of gradients, gathering of weights
    bubble: float  # pipeline stages that wait
    offload: float  # Adam's moments to the host and back, a rollout's share

    @property
    def total(self) -> float:
        """Seconds."""
        return self.products + self.memory + self.tensor + self.expert + self.data + self.bubble + self.offload

    def explain(self) -> str:
        """The terms, a line each, and their sum."""
        parts = [f"  {name:<18} {seconds:10.3f} s" for name, seconds in vars(self).items() if seconds]
        return "\n".join([*parts, f"  {'= step':<18} {self.total:10.3f} s"])


def step_time(job: Job, layout: Layout, memory: Memory, gpu: Gpu, steps_per_rollout: int) -> StepTime:
    """Of the last stage, which has the output layer."""
    passes, layers = job.batch.micro_batches(layout), job.model.num_layers // layout.pp
    products = passes * (layers * _layer_products(job, layout, gpu) + _output_products(job, layout, gpu))
    kept = passes * layers * activations.layer_bytes(job.model, layout, job.batch)
    state = memory.weights + 2 * memory.gradients + 2 * memory.optimizer
    tensor, expert = (passes * layers * one(job, layout, gpu) for one in (_tensor, _expert))
    traffic = rates.TRAFFIC * kept / (gpu.hbm * rates.BANDWIDTH)
    waiting = (layout.pp - 1) / (passes * layout.vpp)
    return StepTime(
        products=products,
        memory=traffic + state / (gpu.hbm * rates.BANDWIDTH),
        tensor=tensor,
        expert=expert,
        data=_data(job, layout, memory, gpu),
        bubble=waiting * (products + traffic + tensor + expert),
        offload=2 * memory.offloaded / (gpu.host * rates.BANDWIDTH) / steps_per_rollout,
    )


def _layer_products(job: Job, layout: Layout, gpu: Gpu) -> float:
    """Seconds of one layer's products for one micro-batch."""
    model, batch = job.model, job.batch
    tokens = layout.micro_batch * batch.sequence / layout.cp
    experts = 3 * model.hidden_size * (model.moe_ffn_hidden_size or 0) // layout.etp * (model.moe_router_topk or 0)
    dense = active_parameters(model, layout) - experts
    rows = tokens / layout.tp * layout.etp  # that an expert's rank sees, times the experts of a token
    # Causal attention: each token meets half of the others, for the scores and for their product with the values.
    scores = 2 * batch.sequence * model.num_attention_heads // layout.tp * model.kv_channels
    again = 1 if layout.recompute == "full" else 0
    full = 2 * (tokens * dense) * (_FORWARD_AND_BACKWARD + again)
    full += tokens * scores * (_FORWARD_AND_BACKWARD + (layout.recompute != "none"))
    rate = _rate(layout, gpu)
    return full / rate + 2 * rows * experts * (_FORWARD_AND_BACKWARD + again) / (rate * _reached(job, layout, rows))


def _reached(job: Job, layout: Layout, rows: float) -> float:
    """The share of a large product's rate that an expert's has, by the rows it gets."""
    model = job.model
    if not model.num_moe_experts:
        return 1.0
    each = rows * layout.ep * (model.moe_router_topk or 0) / model.num_moe_experts
    return each / (each + rates.HALF_ROWS)


def _output_products(job: Job, layout: Layout, gpu: Gpu) -> float:
    """Seconds of the output layer for one micro-batch: its logits are computed once more in the backward pass."""
    rows = layout.micro_batch * job.batch.response / layout.cp
    weights = padded_vocab_size(job.model, job.vocab_size) // layout.tp * job.model.hidden_size
    return 2 * rows * weights * (_FORWARD_AND_BACKWARD + 1) / (gpu.bf16 * rates.MATMUL)


def _rate(layout: Layout, gpu: Gpu) -> float:
    return (gpu.fp8 if layout.fp8 else gpu.bf16) * rates.MATMUL


def _tensor(job: Job, layout: Layout, gpu: Gpu) -> float:
    """Seconds of one layer: each of two parts gathers and scatters in both directions, and gathers its input again."""
    size = layout.micro_batch * job.batch.sequence / layout.cp * job.model.hidden_size * job.batch.element
    again = 2 if layout.recompute == "full" else 0
    dense = 1 if job.model.num_moe_experts else 2  # parts of a layer that are split so: attention, feed-forward
    return dense * (5 + again) * _moved(size, layout.tp) / _link(layout.tp, gpu)


def _expert(job: Job, layout: Layout, gpu: Gpu) -> float:
    """Seconds of one layer: tokens to their experts and back, in both directions."""
    model, batch = job.model, job.batch
    rows = layout.micro_batch * batch.sequence / (layout.cp * layout.tp) * (model.moe_router_topk or 0)
    size = rows * model.hidden_size * batch.element
    again = 2 if layout.recompute == "full" else 0
    return (4 + again) * _moved(size, layout.ep) / _link(layout.ep * layout.etp, gpu)


def _data(job: Job, layout: Layout, memory: Memory, gpu: Gpu) -> float:
    """Gradients reduced over the copies; with the distributed optimizer in parts, and the weights gathered."""
    reduced = memory.gradients + (memory.weights if layout.distributed_optimizer else memory.gradients)
    experts = min(expert_parameters(job.model, layout) * 4 / memory.gradients, 1.0)  # their share; those are float32
    moved = reduced * ((1 - experts) * _moved(1, layout.dp * layout.cp) + experts * _moved(1, layout.expert_dp))
    return moved / _link(layout.gpus, gpu)


def _moved(size: float, ranks: int) -> float:
    """Of `size` bytes, those that are another rank's."""
    return size * (ranks - 1) / ranks


def _link(ranks: int, gpu: Gpu) -> float:
    return (gpu.nvlink if ranks <= rates.NODE else gpu.network) * rates.BANDWIDTH
