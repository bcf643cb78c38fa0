"""Every objective once more, as plain loops over responses and tokens in float64.

Written from the formulas in the papers and independent of `nemo_sspo.objective`: products instead of sums of logs, min
instead of where, gates from their formulas in rho. Slow on purpose. Gradients come from autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GATE_FORMULAS = {
    "expsig": lambda rho, tau: (4 / tau) * (torch.sigmoid(tau * (rho - 1)) - 0.5),
    "expatan": lambda rho, tau: (1 / tau) * torch.atan(tau * (rho - 1)),
    "gumbel": lambda rho, tau: 1 - torch.exp(1 - rho),
    "siglog": lambda rho, tau: (4 / tau) * (torch.sigmoid(tau * torch.log(rho)) - 0.5),
    "atanlog": lambda rho, tau: (1 / tau) * torch.atan(tau * torch.log(rho)),
}
TOKEN_MEAN = ("cispo", "dapo", "vespo")
TOKEN_SUM = ("rloo", "dr_grpo", "luspo")


def loop_loss(
    options: dict,
    policy: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """The loss of a padded batch [B, T]; `options` holds a name and every option that the objective needs."""
    name, rows = options["name"], range(policy.shape[0])
    tokens = [[t for t in range(policy.shape[1]) if mask[i, t]] for i in rows]
    total_tokens = sum(len(row) for row in tokens)
    loss = torch.zeros((), dtype=torch.float64)
    for i in rows:
        if not tokens[i]:
            continue
        logp = [policy[i, t] for t in tokens[i]]
        rho = [torch.exp(policy[i, t] - old[i, t]) for t in tokens[i]]
        loss = loss - _response(name, options, logp, rho, advantages[i]) / _denominator(name, len(rows), total_tokens)
        for t in tokens[i]:
            scale = 1 / len(tokens[i]) if name not in TOKEN_MEAN + TOKEN_SUM else 1 / options.get("length_scale", 1.0)
            scale = scale / _denominator(name, len(rows), total_tokens)
            if reference is not None:
                loss = loss + options["kl_coeff"] * scale * _kl(options, policy[i, t], reference[i, t])
            if entropy is not None:
                loss = loss - options["entropy_coeff"] * scale * entropy[i, t]
    return loss


def _denominator(name: str, rows: int, tokens: int) -> int:
    return tokens if name in TOKEN_MEAN else rows


def _response(name: str, o: dict, logp: list[Tensor], rho: list[Tensor], a: Tensor) -> Tensor:
    """The contribution of one response to J, before the denominator."""
    n = len(rho)
    positive = float(a) > 0
    sign = math.copysign(1.0, float(a)) if float(a) else 0.0
    tau = (o["tau_pos"] if positive else o["tau_neg"]) if "tau_pos" in o else None

    if name == "sspo":
        product = math.prod([torch.exp(GATE_FORMULAS[o["gate"]](r, tau)) for r in rho])
        return a * product ** (1 / n)
    if name in ("grpo", "dapo", "dr_grpo"):
        total = sum(torch.min(r * a, r.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * a) for r in rho)
        return total / {"grpo": n, "dapo": 1, "dr_grpo": o.get("length_scale", 1.0)}[name]
    if name in ("gspo", "luspo"):
        s = math.prod(rho) ** (1 / n)
        clipped = torch.min(s * a, s.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * a)
        return clipped if name == "gspo" else clipped * n / o.get("length_scale", 1.0)
    if name == "gspo_token":
        s = (math.prod(rho) ** (1 / n)).detach()
        token = [s * torch.exp(x) / torch.exp(x).detach() for x in logp]
        return sum(torch.min(s * a, s.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * a) for s in token) / n
    if name == "gmpo":
        low, high = math.exp(-o["clip_low"]), math.exp(o["clip_high"])
        inside = [torch.min(r**sign, r.clamp(low, high) ** sign) ** sign for r in rho]
        return a * math.prod(inside) ** (1 / n)
    if name == "sapo":
        return a * sum((4 / tau) * torch.sigmoid(tau * (r - 1)) for r in rho) / n
    if name == "cispo":
        weights = [r.detach().clamp(1 - o["clip_low"], 1 + o["clip_high"]) for r in rho]
        return a * sum(w * x for w, x in zip(weights, logp, strict=True))
    if name == "rloo":
        return a * sum(logp) / o.get("length_scale", 1.0)
    if name == "vespo":
        k, decay = (o["k_pos"], o["lambda_pos"]) if positive else (o["k_neg"], o["lambda_neg"])
        w = math.prod(rho).detach()
        return a * math.exp(decay) * w**k * torch.exp(-decay * w) * sum(logp)
    raise AssertionError(name)


def _kl(o: dict, policy: Tensor, reference: Tensor) -> Tensor:
    if o["kl_estimator"] == "k1":
        return policy - reference
    if o["kl_estimator"] == "k2":
        return 0.5 * (policy - reference) ** 2
    ratio = torch.exp(reference) / torch.exp(policy)
    return ratio - torch.log(ratio) - 1
