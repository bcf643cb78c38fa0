"""Time and peak extra memory of every objective, forward and backward, on log-probs [512, 4096].

    python tests/benchmarks/objectives.py [--responses 512 --tokens 4096 --rounds 3 --only grpo sspo:atanlog ...]

A row is an objective with its own defaults, ``sspo`` with each of its gates. ``bytes a token`` is peak memory above the
inputs (how it is measured: measure.py), over the tokens of the padded batch; 4 of them are the log-probs' gradient.

One process a measurement, one at a time, the objectives taking turns: first the memory of one call, then in every
round the median time of ten. On a GPU if there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from measure import DEVICE, in_own_process, measure, print_table

from nemo_sspo.objective import GATES, OBJECTIVES, build_objective

BASELINE = "grpo"
ROWS = [BASELINE, *(f"sspo:{gate}" for gate in GATES), *(name for name in OBJECTIVES if name not in (BASELINE, "sspo"))]


def measure_one(row: str, responses: int, tokens: int, repeats: int) -> dict[str, float]:
    name, _, gate = row.partition(":")
    objective = build_objective({"name": name, "gate": gate} if gate else {"name": name})

    def run(responses: int, tokens: int) -> dict[str, float]:
        torch.manual_seed(0)
        shape = (responses, tokens)
        old = torch.randn(shape, device=DEVICE).mul_(0.5).sub_(1.0)
        policy = torch.randn(shape, device=DEVICE).mul_(0.1).add_(old).requires_grad_()
        advantages = torch.randn(responses, device=DEVICE)
        lengths = torch.randint(tokens // 4, tokens + 1, (responses, 1), device=DEVICE)
        mask = torch.arange(tokens, device=DEVICE) < lengths

        def forward_and_backward() -> None:
            policy.grad = None
            objective(policy, old, advantages, mask).loss.backward()

        return measure(forward_and_backward, repeats)

    run(4, 64)  # libraries load, threads start
    return run(responses, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help=f"always with {BASELINE}")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "REPEATS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        row, repeats = options.one
        print(json.dumps(measure_one(row, options.responses, options.tokens, int(repeats))))
        return
    flags = [f"--{name}={getattr(options, name)}" for name in ("responses", "tokens", "threads")]

    def one(row: str, repeats: int, exact_memory: bool) -> dict[str, Any]:
        result = in_own_process(__file__, "--one", row, str(repeats), *flags, exact_memory=exact_memory)
        if "failed" in result:
            raise SystemExit(f"{row}: {result['failed']}")
        return result

    rows = [row for row in ROWS if row in [*options.only, BASELINE]]
    extra = {row: one(row, 1, True)["extra_bytes"] for row in rows}
    rounds = [{row: one(row, 10, False) for row in rows} for _ in range(options.rounds)]

    def median(row: str, key: str) -> float:
        return statistics.median(results[row][key] for results in rounds)

    table = [
        [
            row,
            f"{extra[row] / options.responses / options.tokens:.1f}",
            f"{median(row, 'seconds') * 1e3:.1f} ms",
            f"{median(row, 'seconds') / median(BASELINE, 'seconds'):.2f}",
            f"{median(row, 'cpu_seconds') * 1e3:.1f} ms",
            f"{median(row, 'cpu_seconds') / median(BASELINE, 'cpu_seconds'):.2f}",
        ]
        for row in rows
    ]
    title = f"[{options.responses}, {options.tokens}] float32 on {DEVICE.type}, {options.rounds} rounds"
    print_table(title, ["objective", "bytes a token", "time", f"/ {BASELINE}", "processor", f"/ {BASELINE}"], table)


if __name__ == "__main__":
    main()
