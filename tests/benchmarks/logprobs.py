"""Time and peak extra memory of log-probs from hidden states, forward and backward, four ways.

    python tests/benchmarks/logprobs.py [--tokens 2048 --hidden 2048 --vocab 151936 --rounds 3 --threads 1 ...]

The ways: ``linear_logprobs`` of this package (which also gives the entropy); the plain ``log_softmax(hidden @ W.T)``;
TRL's idea of a selective log-softmax over full logits (the target's logit minus a log-sum-exp, sequence by sequence;
in half precision a log-softmax of one sequence at a time); Liger-Kernel's fused linear GRPO loss, if it is installed.
All of them have the gradient of the same loss, and the table is printed only after their gradients were found to agree.

``extra`` is peak memory above the inputs (how it is measured: measure.py). ``above grads`` is what is left of it after
the gradients of hidden and weight, which every way has to hand over in the end: with N = H the weight's gradient
alone is a third of what the plain way needs. It flatters the plain way, whose peak comes before it has any gradient.
``matrix rate`` is the work of the three necessary matrix products (logits and two gradients) over time, as a share of
what one large square product reaches on the same device in the same dtype. ``linear_logprobs`` makes four, so 75% is
its ceiling, but for bfloat16 on a CPU, where it multiplies in float32.

One process a measurement, one at a time, the ways taking turns; medians. On a CPU in float32 and bfloat16, on a GPU
in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from measure import DEVICE, in_own_process, matrix_rate, measure, print_table
from torch import Tensor

SEQUENCES = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GIGABYTE = 1e9

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # hidden [N, H], weight [V, H], targets [N], advantages [B]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    from nemo_sspo.parallel import linear_logprobs

    logprobs, _ = linear_logprobs(hidden, weight, targets)
    return _policy_loss(logprobs, advantages)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    logprobs = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return _policy_loss(logprobs, advantages)


def selective(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    logits = (hidden @ weight.T).view(SEQUENCES, -1, weight.shape[0])
    targets = targets.view(SEQUENCES, -1, 1)
    if logits.dtype in (torch.float32, torch.float64):
        normalizers = torch.stack([sequence.logsumexp(-1) for sequence in logits])
        logprobs = logits.gather(-1, targets).squeeze(-1) - normalizers
    else:
        rows = zip(logits, targets, strict=True)
        logprobs = torch.stack([row.log_softmax(-1).gather(-1, target).squeeze(-1) for row, target in rows])
    return _policy_loss(logprobs.view(-1), advantages)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    loss_of = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")
    shaped, targets = hidden.view(SEQUENCES, -1, hidden.shape[1]), targets.view(SEQUENCES, -1)
    loss, _ = loss_of(shaped, weight, targets, torch.ones_like(targets), advantages)
    return loss


WAYS: dict[str, Loss] = {"ours": ours, "plain": plain, "selective (TRL)": selective, "chunked (Liger)": liger}


def _policy_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """On-policy policy gradient, mean over tokens."""
    return -(logprobs.view(SEQUENCES, -1) * advantages.unsqueeze(1)).float().mean()


def measure_one(way: str, dtype: torch.dtype, tokens: int, hidden_size: int, vocab: int) -> dict[str, float]:
    def run(tokens: int, vocab: int, repeats: int) -> dict[str, float]:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=dtype).requires_grad_()
        weight = torch.empty(vocab, hidden_size, device=DEVICE, dtype=dtype).normal_(std=0.02).requires_grad_()
        targets = torch.randint(vocab, (tokens,), device=DEVICE)
        advantages = torch.linspace(-1, 1, SEQUENCES, device=DEVICE)

        def forward_and_backward() -> None:
            hidden.grad = weight.grad = None
            WAYS[way](hidden, weight, targets, advantages).backward()

        result = measure(forward_and_backward, repeats)
        assert hidden.grad is not None and weight.grad is not None
        grad_bytes = hidden.grad.nbytes + weight.grad.nbytes
        return {**result, "grad_bytes": grad_bytes, "grad_norm": hidden.grad.double().norm().item()}

    run(64, 512, 2)  # libraries load, threads start
    return run(tokens, vocab, 5 if DEVICE.type == "cuda" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="always with the plain one")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=None)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.tokens, options.hidden, options.vocab)
    torch.set_num_threads(options.threads)
    if options.one:
        way, dtype = options.one
        print(json.dumps(measure_one(way, DTYPES[dtype], *sizes)))
        return
    flags = [f"--{name}={value}" for name, value in zip(("tokens", "hidden", "vocab"), sizes, strict=True)]
    flags.append(f"--threads={options.threads}")
    for dtype in options.dtypes or (["bfloat16"] if DEVICE.type == "cuda" else list(DTYPES)):
        results: dict[str, list[dict]] = {way: [] for way in WAYS if way in [*options.ways, "plain"]}
        for _ in range(options.rounds):
            for way, taken in results.items():
                if not (taken and "failed" in taken[0]):
                    taken.append(in_own_process(__file__, "--one", way, dtype, *flags, exact_memory=True))
        _print(dtype, sizes, results)


def _print(dtype: str, sizes: tuple[int, int, int], results: dict[str, list[dict]]) -> None:
    def median(way: str, key: str) -> float:
        return statistics.median(result[key] for result in results[way])

    done = [way for way, taken in results.items() if "failed" not in taken[0]]
    norms = [median(way, "grad_norm") for way in done]
    if max(norms) > min(norms) * (1.02 if dtype == "bfloat16" else 1.0001):
        raise SystemExit(f"the gradients do not agree, in {dtype}: {dict(zip(done, norms, strict=True))}")
    tokens, hidden, vocab = sizes
    rate, flop = matrix_rate(DTYPES[dtype]), 6 * tokens * hidden * vocab
    rows, notes = [], []
    for way, taken in results.items():
        if way not in done:
            rows.append([way, *["-"] * 10])
            notes.append(f"{way} did not run: {taken[0]['failed']}")
            continue
        seconds = [result["seconds"] for result in taken]
        extra = [median(name, "extra_bytes") for name in (way, "plain")]
        above = [median(name, "extra_bytes") - median(name, "grad_bytes") for name in (way, "plain")]
        cpu = [median(name, "cpu_seconds") for name in (way, "plain")]
        rows.append(
            [
                way,
                f"{extra[0] / GIGABYTE:.2f} GB",
                f"{extra[0] / extra[1]:.3f}",
                f"{above[0] / GIGABYTE:.2f} GB",
                f"{above[0] / above[1]:.3f}",
                f"{statistics.median(seconds):.3g} s",
                f"{min(seconds):.3g}-{max(seconds):.3g}",
                f"{statistics.median(seconds) / median('plain', 'seconds'):.2f}",
                f"{cpu[0]:.3g} s",
                f"{cpu[0] / cpu[1]:.2f}",
                f"{flop / statistics.median(seconds) / rate:.0%}",
            ]
        )
    title = f"{dtype} on {DEVICE.type}: N {tokens}, H {hidden}, V {vocab}, {len(results['plain'])} rounds"
    header = ["way", "extra", "/ plain", "above grads", "/ plain", "time", "range", "/ plain"]
    header += ["processor", "/ plain", "matrix rate"]
    print_table(f"{title}; one square product: {rate / 1e12:.3g} TFLOP/s", header, rows)
    print("\n".join(notes))


if __name__ == "__main__":
    main()
