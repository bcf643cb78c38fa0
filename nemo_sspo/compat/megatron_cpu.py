"""Megatron-Core on a machine without a GPU.

What: the modules of ``megatron.core`` see a ``torch`` whose CUDA device is the CPU. Only the name ``torch`` inside
those modules is rebound, to a thin proxy; the real ``torch`` and ``torch.cuda`` that everyone else uses stay as they
are, and nothing runs per operation, as a ``TorchFunctionMode`` that redirects devices would.

Versions: megatron-core 0.16.1 (`SUPPORTED`), torch >= 2.6.
Why, one by one:

* ``device="cuda"`` and ``torch.cuda.current_device()`` are written into schedules, buffers, layers and optimizers.
* ``torch.cuda`` streams, events and RNG states are used without asking whether there is a device.
* optimizers and gradient clipping compare ``tensor.type()`` with ``'torch.cuda.FloatTensor'`` and its kin: in their
  code those constants become the CPU's.
* the distributed optimizer gathers its state for a checkpoint with ``tensor.cuda()``, and expects the optimizers of
  Apex or Transformer Engine when it loads one: PyTorch's Adam has a step count in the state of each parameter.
* pipeline stages that share the embedding bring it to the GPU with ``tensor.cuda()`` before they agree on it.
* the token dispatcher gives the splits of an all-to-all as tensors; gloo wants numbers.
* with expert-tensor parallelism it gathers parts of different sizes; NCCL takes them, gloo does not.
* without Transformer Engine, `moe_utils.py` never defines ``te_general_gemm`` but reads it in the router's forward.
* at import it warns of each fused kernel that is absent, some twenty lines; those warnings are silenced.
* ``jit_fuser`` is ``torch.compile``; on a CPU it needs a C++ compiler and a minute for what it saves, and three seconds
  to be imported.

When it can go: when Megatron-Core takes its device from its configuration. `tests/unit/compat` fails when a patch
is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import warnings
from types import CodeType, ModuleType
from typing import Any

import torch

import nemo_sspo.compat.transformer_engine  # noqa: F401  (before Megatron-Core)

SUPPORTED = "0.16.1"
# In force from this module's import on, so the packages that import Megatron-Core import this one first.
warnings.filterwarnings("ignore", message=".*Falling back to", category=UserWarning)
warnings.filterwarnings("ignore", message=".*_tensor. is deprecated", category=FutureWarning)  # PyTorch's renaming
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
warnings.filterwarnings("ignore", message=".*Disabling sequence parallel", category=UserWarning)  # of experts
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning)
warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)


def _import_uncompiled() -> None:
    """Import Megatron-Core with a ``jit_fuser`` that changes nothing, where PyTorch has no CUDA built in.

    Asking whether there is a device would start the driver, and ``CUDA_VISIBLE_DEVICES`` would come too late.
    """
    if torch.version.cuda is not None or "megatron.core.jit" in sys.modules:
        return
    compiler = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compiler


_import_uncompiled()
_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros", "as_tensor")


class _NullStream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class Proxy(ModuleType):
    """A module whose names are those of another, but for the ones that are set on it."""

    def __init__(self, target: ModuleType, **names: Any) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(names, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


def _on_cpu(factory: Any) -> Any:
    """`factory` with ``device="cuda..."`` redirected to the CPU."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return redirected


def _cuda_proxy() -> Proxy:
    stream = _NullStream()
    rng_state = {
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    return Proxy(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda *args, **kwargs: None,
        empty_cache=lambda: None,
        Stream=_NullStream,
        Event=_NullStream,
        current_stream=lambda *args, **kwargs: stream,
        default_stream=lambda *args, **kwargs: stream,
        stream=lambda *args, **kwargs: contextlib.nullcontext(),
        manual_seed=torch.manual_seed,
        random=Proxy(torch.cuda.random, **rng_state),
        **rng_state,
    )


def _torch_proxy() -> Proxy:
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    distributed = Proxy(
        torch.distributed,
        all_to_all_single=_all_to_all_single,
        all_gather=_all_gather,
    )
    return Proxy(torch, cuda=_cuda_proxy(), distributed=distributed, **factories)


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **options: Any,
) -> Any:
    """``torch.distributed.all_to_all_single`` that also takes its splits as tensors."""
    splits = [None if s is None else [int(n) for n in s] for s in (output_split_sizes, input_split_sizes)]
    return torch.distributed.all_to_all_single(output, input, splits[0], splits[1], **options)


def _all_gather(outputs: list[torch.Tensor], input: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """``torch.distributed.all_gather`` that also takes parts whose first sizes differ."""
    if all(output.shape == outputs[0].shape for output in outputs):
        return torch.distributed.all_gather(outputs, input, group=group, **options)
    longest = max(len(output) for output in outputs)
    padded = [output.new_empty(longest, *output.shape[1:]) for output in outputs]
    own = torch.cat([input, input.new_zeros(longest - len(input), *input.shape[1:])])
    torch.distributed.all_gather(padded, own, group=group)
    for output, whole in zip(outputs, padded, strict=True):
        output.copy_(whole[: len(output)])
    return None


def _cpu_type_names(constant: Any) -> Any:
    """``'torch.cuda.FloatTensor'`` -> ``'torch.FloatTensor'``, also within tuples and the code of inner functions."""
    if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
        return constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, tuple):
        return tuple(_cpu_type_names(c) for c in constant)
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_cpu_type_names(constant.co_consts))
    return constant


def _keep_step(set_states: Any) -> Any:
    """The distributed optimizer's setter of a parameter's loaded state, where PyTorch's step count is part of that."""

    @functools.wraps(set_states)
    def with_step(self: Any, model_param: Any, tensors: dict) -> None:
        present = self._get_main_param_and_optimizer_states(model_param)
        set_states(self, model_param, {k: v for k, v in present.items() if k == "step"} | tensors)

    return with_step


def _stay_on_cpu(function: Any) -> None:
    """Let `function` call ``tensor.cpu()`` and ``torch.cpu.current_device()`` where it names ``cuda``."""
    names = tuple("cpu" if name == "cuda" else name for name in function.__code__.co_names)
    function.__code__ = function.__code__.replace(co_names=names)


def _expect_cpu_tensors(module: ModuleType) -> None:
    """Let every function of `module` that names a CUDA tensor type name the CPU's instead."""
    owners = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__)]
    for owner in owners:
        for value in list(vars(owner).values()):
            function = inspect.unwrap(getattr(value, "__func__", value))  # under classmethod and torch.no_grad
            code = getattr(function, "__code__", None)
            if code is not None and _cpu_type_names(code) != code:
                function.__code__ = _cpu_type_names(code)


def _uncompiled(module: ModuleType) -> None:
    """Undo ``@jit_fuser``: put the plain Python function back where ``torch.compile`` wrapped it."""
    owners = [module, *(c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__)]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            original = getattr(value, "_torchdynamo_orig_callable", None)
            if original is not None:
                setattr(owner, name, original)


def install() -> bool:
    """Let Megatron-Core run on the CPU where there is no CUDA device; elsewhere do nothing.

    Idempotent, and to be called after the Megatron modules in use are imported: it rebinds names in those. Returns
    whether the patches are in place.
    """
    if torch.cuda.is_available():
        return False
    import megatron.core.models.common.language_module.language_module as language_module
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    proxy = (
        next((m.torch for n, m in sys.modules.items() if n.startswith("megatron.core") and _is_proxy(m)), None)
        or _torch_proxy()
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
            _uncompiled(module)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    for module in (clip_grads, distrib_optimizer, optimizer):
        _expect_cpu_tensors(module)
    distributed: Any = distrib_optimizer.DistributedOptimizer
    _stay_on_cpu(distributed.get_parameter_state_dp_zero)
    _stay_on_cpu(language_module.LanguageModule.setup_embeddings_and_output_layer)
    if not hasattr(distributed._set_main_param_and_optimizer_states, "__wrapped__"):
        setter = distributed._set_main_param_and_optimizer_states
        distributed._set_main_param_and_optimizer_states = _keep_step(setter)
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    return True


def _is_proxy(module: ModuleType) -> bool:
    return isinstance(getattr(module, "torch", None), Proxy)
