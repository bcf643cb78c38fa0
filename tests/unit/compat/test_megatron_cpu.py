"""The CPU patches: they stay inside Megatron-Core, and each is still needed."""

from __future__ import annotations

import importlib.util
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from nemo_sspo.compat import megatron_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU nothing is patched")


def source(module: str) -> str:
    """The text of a Megatron-Core module, as installed."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def test_torch_itself_is_untouched(policy):
    assert megatron_cpu.install()
    assert inspect.isbuiltin(torch.zeros)  # the proxy's are Python functions
    assert not isinstance(torch.cuda, megatron_cpu._Proxy)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_install_twice_changes_nothing(policy):
    from megatron.core.pipeline_parallel import schedules

    megatron_cpu.install()
    proxy = schedules.torch
    megatron_cpu.install()
    assert schedules.torch is proxy


def test_the_proxy_redirects_cuda_and_nothing_else(policy):
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros(2, device="cuda").device.type == "cpu"
    assert schedules.torch.zeros(2, device="meta").device.type == "meta"
    assert schedules.torch.cuda.current_device() == torch.device("cpu")
    assert schedules.torch.Tensor is torch.Tensor


def test_clipping_scales_to_the_norm_and_leaves_small_gradients():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    megatron_cpu._clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-6, rtol=0)
    megatron_cpu._clip_grad_by_total_norm_fp32([parameter], max_norm=2.0, total_norm=1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-6, rtol=0)


def test_the_patched_version_is_the_installed_one():
    assert version("megatron-core") == megatron_cpu.SUPPORTED, "look through the patches, then raise SUPPORTED"


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        ("megatron.core.pipeline_parallel.schedules", r'device="cuda"'),
        ("megatron.core.distributed.param_and_grad_buffer", r"torch\.cuda\.current_device\(\)"),
        ("megatron.core.tensor_parallel.random", r"torch\.cuda\.manual_seed\("),
        ("megatron.core.optimizer.clip_grads", r"'torch\.cuda\.FloatTensor'"),
        ("megatron.core.jit", r"jit_fuser = torch\.compile"),
    ],
)
def test_each_patch_is_still_needed(module, pattern):
    assert re.search(pattern, source(module)), f"{module} no longer has {pattern}: remove that patch"


def test_te_general_gemm_is_still_undefined_without_transformer_engine():
    text = source("megatron.core.transformer.moe.moe_utils")
    assert re.search(r"te_general_gemm is not None", text)
    assert not re.search(r"^\s*te_general_gemm = None", text, re.MULTILINE), "upstream defines it: remove that patch"
