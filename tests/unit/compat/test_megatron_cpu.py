"""The CPU patches: they stay inside Megatron-Core, and each is still needed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

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
    assert not isinstance(torch.cuda, megatron_cpu.Proxy)
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


def test_clipping_scales_to_the_norm_and_leaves_small_gradients(policy):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32, get_grad_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    group = policy.groups.tp
    assert get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=group) == pytest.approx(5.0)
    assert count_zeros_fp32([parameter], grad_stats_parallel_group=group, tp_group=group) == 1
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]), atol=1e-6, rtol=0)
    clip_grad_by_total_norm_fp32([parameter], max_norm=2.0, total_norm=1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]), atol=1e-6, rtol=0)


def test_clipping_still_refuses_other_precisions(policy):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)


@pytest.mark.parametrize(
    ("constant", "expected"),
    [
        ("torch.cuda.FloatTensor", "torch.FloatTensor"),
        ("torch.cuda.BFloat16Tensor", "torch.BFloat16Tensor"),
        (("torch.cuda.HalfTensor", 1, ("torch.cuda.FloatTensor",)), ("torch.HalfTensor", 1, ("torch.FloatTensor",))),
        ("torch.cuda.current_device", "torch.cuda.current_device"),
        ("one of torch.cuda.FloatTensor", "one of torch.cuda.FloatTensor"),
        ("FloatTensor", "FloatTensor"),
        (None, None),
        (2.5, 2.5),
    ],
)
def test_names_of_tensor_types(constant, expected):
    assert megatron_cpu._cpu_type_names(constant) == expected


TYPES_MODULE = """
import torch

def plain(tensor):
    return tensor.type() == "torch.cuda.FloatTensor"

def inner(tensor):
    return [t.type() in ["torch.cuda.HalfTensor", "torch.cuda.FloatTensor"] for t in [tensor]][0]

@torch.no_grad()
def wrapped(tensor):
    return plain(tensor) and tensor.type() == "torch.cuda.FloatTensor"

class Checks:
    def method(self, tensor):
        return tensor.type() == "torch.cuda.FloatTensor"

    @classmethod
    def of_class(cls, tensor):
        return tensor.type() == "torch.cuda.FloatTensor"

    @staticmethod
    def static(tensor):
        return tensor.type() == "torch.cuda.FloatTensor"

def untouched(tensor):
    return tensor.numel()
"""


def test_every_function_of_a_module_expects_cpu_tensors():
    module = ModuleType("types_module")
    exec(TYPES_MODULE, module.__dict__)
    tensor, checks = torch.zeros(2), module.Checks()
    functions = [module.plain, module.inner, module.wrapped, checks.method, checks.of_class, checks.static]
    assert [f(tensor) for f in functions] == [False] * 6
    code = module.untouched.__code__
    megatron_cpu._expect_cpu_tensors(module)
    assert [f(tensor) for f in functions] == [True] * 6
    assert [f(tensor.double()) for f in functions] == [False] * 6
    assert module.untouched.__code__ is code


@pytest.mark.parametrize("name", ["clip_grads", "distrib_optimizer", "optimizer"])
def test_no_optimizer_asks_for_cuda_tensors(policy, name):
    module = importlib.import_module(f"megatron.core.optimizer.{name}")

    def constants(code) -> list:
        inner = [c for c in code.co_consts if inspect.iscode(c)]
        return [*code.co_consts, *(c for i in inner for c in constants(i))]

    owners = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__)]
    functions = [inspect.unwrap(getattr(f, "__func__", f)) for owner in owners for f in vars(owner).values()]
    found = [c for f in functions if inspect.isfunction(f) for c in constants(f.__code__)]
    flat = [n for c in found for n in (c if isinstance(c, tuple) else [c])]
    assert not [n for n in flat if n in {f"torch.cuda.{t}Tensor" for t in ("Float", "Half", "BFloat16")}]
    assert "torch.FloatTensor" in flat


def test_the_patched_version_is_the_installed_one():
    assert version("megatron-core") == megatron_cpu.SUPPORTED, "look through the patches, then raise SUPPORTED"


@pytest.mark.parametrize(
    ("module", "pattern"),
    [
        ("megatron.core.pipeline_parallel.schedules", r'device="cuda"'),
        ("megatron.core.models.common.language_module.language_module", r"weight\.data = weight\.data\.cuda\(\)"),
        ("megatron.core.distributed.param_and_grad_buffer", r"torch\.cuda\.current_device\(\)"),
        ("megatron.core.tensor_parallel.random", r"torch\.cuda\.manual_seed\("),
        ("megatron.core.optimizer.clip_grads", r"'torch\.cuda\.FloatTensor'"),
        ("megatron.core.optimizer.distrib_optimizer", r"'torch\.cuda\.FloatTensor'"),
        ("megatron.core.optimizer.optimizer", r"'torch\.cuda\.BFloat16Tensor'"),
        # only splits from a GPU become numbers; those of a CPU stay tensors
        ("megatron.core.transformer.moe.moe_utils", r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:"),
        ("megatron.core.tensor_parallel.mappings", r"all_to_all_single\(\s+output,\s+input,\s+output_split_sizes="),
        ("megatron.core.tensor_parallel.mappings", r"torch\.distributed\.all_gather\(output_tensor_list, input_,"),
        ("megatron.core.optimizer.distrib_optimizer", r"send_tensor = send_tensor\.cuda\(\)"),
        ("megatron.core.optimizer.distrib_optimizer", r"dst_tensors\[key\]\.copy_\(tensors\[key\]\)"),
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", r'get_context\("fork"\)'),
        # nemo_sspo.model.layers
        ("megatron.core.tensor_parallel.layers", r'"allreduce", not \(self\.is_expert and self\.expert_parallel\)'),
        ("megatron.core.transformer.torch_norm", r"sequence parallel not supported by torch LayerNorm"),
        # warnings that are silenced
        ("megatron.core.transformer.transformer_config", r"full scope is deprecated"),
        ("megatron.core.tensor_parallel.layers", r"Disabling sequence parallel"),
        ("megatron.core.models.gpt.gpt_layer_specs", r"Falling back to"),
        ("megatron.core.jit", r"jit_fuser = torch\.compile"),
    ],
)
def test_each_patch_is_still_needed(module, pattern):
    assert re.search(pattern, source(module)), f"{module} no longer has {pattern}: remove that patch"


def test_te_general_gemm_is_still_undefined_without_transformer_engine():
    text = source("megatron.core.transformer.moe.moe_utils")
    assert re.search(r"te_general_gemm is not None", text)
    assert not re.search(r"^\s*te_general_gemm = None", text, re.MULTILINE), "upstream defines it: remove that patch"


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a PyTorch without CUDA, where nothing is compiled")
def test_training_starts_without_what_it_does_not_use():
    """The compilers of PyTorch and the plotting library take as long to import as all the rest."""
    code = "import sys, nemo_sspo.training.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch._inductor.compile_fx", "matplotlib"}.isdisjoint(done.stdout.split())
    assert "megatron.core.models.gpt" in done.stdout.split()
