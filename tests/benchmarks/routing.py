"""What routing replay costs: processor time of a training step, of a log-prob pass and of generation; bytes a token.

``python -m tests.benchmarks.routing`` builds one model with the hooks and alternates passes with and without routes,
so that both see the same machine. Processor time of one thread is compared: other programs disturb it least. The routes
are those that the model chose, so that both kinds of passes send every token to the same experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.benchmarks.measure import print_table

SHAPE = {"num_layers": 4, "hidden_size": 128, "kv_channels": 32, "num_attention_heads": 4, "num_query_groups": 2}
SHAPE |= {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "encoder_seq_length": 128}
VOCAB = 4096


def seconds(action: Callable[[], object]) -> float:
    """Processor time of this thread."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


def compare(name: str, plain: Callable[[], object], routed: Callable[[], object], rounds: int) -> list[str]:
    """A row: medians, their ratio, and the lowest and highest ratio of neighbours."""
    for action in (plain, routed):  # caches, and the optimizer's state
        action()
    pairs = []
    for number in range(rounds):
        order = (plain, routed) if number % 2 else (routed, plain)
        taken = {action: seconds(action) for action in order}
        pairs.append((taken[plain], taken[routed]))
    without, with_routes = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    spread = f"{statistics.quantiles(ratios, n=4)[0]:.3f}-{statistics.quantiles(ratios, n=4)[2]:.3f}"
    return [name, f"{without * 1e3:.1f} ms", f"{with_routes * 1e3:.1f} ms", f"{statistics.median(ratios):.3f}", spread]


def measure_all(experts: int, rounds: int) -> None:
    from nemo_sspo.config.load import load_config
    from nemo_sspo.config.schema import OptimizerConfig
    from nemo_sspo.generation import SamplingParams
    from nemo_sspo.generation.native import NativeEngine
    from nemo_sspo.model import build_model
    from nemo_sspo.routing import RoutingReplay
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import process_groups
    from tests.benchmarks.layouts import full_batch
    from tests.distributed.layouts import loss_of

    config = load_config("tiny_moe_cpu", [f"model.{k}={v}" for k, v in (SHAPE | {"num_moe_experts": experts}).items()])
    with process_groups(config.model) as groups:
        policy = build_model(config.model, VOCAB, groups)
        routing = RoutingReplay(policy.chunks, policy.config, groups)
        actor = Actor(policy, 4, routing=routing)
        actor.set_optimizer(OptimizerConfig(lr=1e-9), clip_grad=1.0, total_steps=10_000)
        engine = NativeEngine(policy, SHAPE["encoder_seq_length"], 64, routing)

        batch = full_batch(16, 64, VOCAB)
        _, _, routes = actor.record_routes(batch, 8)
        routed, loss = replace(batch, routes=routes), loss_of(batch)
        prompts = [row[:16].tolist() for row in batch.tokens]

        def step(batch: Any) -> Callable[[], object]:
            return lambda: actor.step(batch, loss)

        def logprobs(batch: Any) -> Callable[[], object]:
            return lambda: actor.logprobs(batch, 8)

        def generate(return_routes: bool) -> Callable[[], object]:
            sampling = SamplingParams(32, 1.0, stop_id=VOCAB, return_routes=return_routes)
            return lambda: engine.generate(prompts, sampling, range(len(prompts)))

        rows = [
            compare("training step, R2 or R3", step(batch), step(routed), rounds),
            compare("log-prob pass, R2: recorded", logprobs(batch), lambda: actor.record_routes(batch, 8), rounds),
            compare("log-prob pass, R3: replayed", logprobs(batch), logprobs(routed), rounds),
            compare("generation, R3: recorded", generate(False), generate(True), rounds // 3 + 2),
        ]
    title = f"16 rows of 64 tokens, {SHAPE['num_layers']} layers of {experts} experts, {rounds} rounds"
    print_table(title, ["processor time", "without", "with", "ratio", "quartiles"], rows)
    print_bytes("this model", routing.form, torch.cat(routes))


def print_bytes(name: str, form: Any, kept: torch.Tensor) -> None:
    stored = kept.numel() * kept.element_size() / len(kept)
    print(f"{name}: {stored:.0f} bytes a token in a rollout, {form.bytes_per_token} expected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--experts", type=int, default=SHAPE["num_moe_experts"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_all(options.experts, options.rounds)

    from nemo_sspo.routing import RouteFormat

    qwen = RouteFormat(tuple(range(1, 49)), num_experts=128, topk=8)
    print_bytes("Qwen3-30B-A3B", qwen, qwen.pack(torch.rand(100, 48, 128).argsort(-1)[..., :8], "random"))


if __name__ == "__main__":
    main()
