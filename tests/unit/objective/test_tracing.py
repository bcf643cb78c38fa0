"""The objective as one graph: it compiles without a break, does no work per row, and imports torch alone."""

from __future__ import annotations

import ast
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_sspo.objective import OBJECTIVES, build_objective


def batch(rows: int = 4, width: int = 6):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=generator)
    policy = (old + 0.3 * torch.randn(rows, width, generator=generator)).requires_grad_()
    mask = torch.rand(rows, width, generator=generator) < 0.8
    return policy, old, torch.randn(rows, generator=generator), mask


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["sspo", "grpo", "vespo"])
def test_compiles_as_one_graph(name, packed):
    objective = build_objective({"name": name, "check_finite": False})
    policy, old, advantages, mask = batch()
    arguments = {}
    if packed:
        policy, old, mask = policy.detach().flatten().requires_grad_(), old.flatten(), mask.flatten()
        arguments["cu_seqlens"] = torch.arange(5) * 6

    def call(policy):
        out = objective(policy, old, advantages, mask, num_responses=9, num_tokens=99, **arguments)
        return out.loss, out.metrics["gate_weight/mean"]

    torch.compiler.reset()
    compiled, weight = torch.compile(call, backend="aot_eager", fullgraph=True)(policy)
    loss, expected = call(policy)
    torch.testing.assert_close(compiled, loss)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled, policy), torch.autograd.grad(loss, policy))


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_work_does_not_grow_with_rows_and_never_waits_for_the_device(name):
    counts = []
    for rows in (2, 50):
        with Counter() as counter:
            build_objective({"name": name, "check_finite": False})(*batch(rows))
        counts.append(len(counter.calls))
        assert not [call for call in counter.calls if "_local_scalar_dense" in call or "nonzero" in call]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_finite_check_waits_once(name):
    with Counter() as counter:
        build_objective({"name": name})(*batch())
    assert sum("_local_scalar_dense" in call for call in counter.calls) == 1


def test_imports_torch_and_the_standard_library_alone(repository):
    for path in (repository / "nemo_sspo" / "objective").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                allowed = name.split(".")[0] in {"torch", *sys.stdlib_module_names} or name.startswith(
                    ("nemo_sspo.objective", "nemo_sspo.errors")
                )
                assert allowed, f"{path.name} imports {name}"
