"""Norm and linear layers, with Transformer Engine's division of work among tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _ExtraState(torch.nn.Module):
    """FP8's scales, which Transformer Engine's modules keep in their state dict; here there are none of them."""

    def get_extra_state(self) -> Tensor:
        """Empty."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""


class RMSNorm(_ExtraState, torch.nn.RMSNorm):
    """Its weight says that its gradient is a part under sequence parallelism."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cpu",
    ) -> None:
        if zero_centered_gamma:
            raise NotImplementedError("zero-centered gamma has no stand-in")
        super().__init__(hidden_size, eps=eps, dtype=params_dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class _Weights(_ExtraState):
    """Weights ``[out, in]`` of this rank and how its part of inputs and outputs is brought together."""

    def __init__(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] = torch.nn.init.zeros_,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        column, row = parallel_mode == "column", parallel_mode == "row"
        self.in_features = in_features // (tp_size if row else 1)
        self.out_features = out_features // (tp_size if column else 1)
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.tp_group, self.tp_size = tp_group, tp_size
        for name in names:
            weight = torch.nn.Parameter(
                torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device)
            )
            init_method(weight)
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]  (under any parallel mode)
            self.register_parameter(name, weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype, device=device))
            if column:
                self.bias.tensor_model_parallel = True  # type: ignore[attr-defined]

    def _gather(self, x: Tensor) -> Tensor:
        """What a column-parallel layer multiplies: every token, and their gradients added up over the ranks."""
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _reduce(self, x: Tensor) -> Tensor:
        """What the ranks of a row-parallel layer have between them."""
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "row" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(x, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(x, group=self.tp_group)


class Linear(_Weights):
    """``x W^T``; the bias is added, or returned beside."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(["weight"], in_features, out_features, **options)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``[S, B, in]`` to ``[S, B, out]``."""
        out = self._reduce(self._gather(inp) @ self.weight.t())
        if not self.use_bias:
            return out
        return (out, self.bias) if self.return_bias else out + self.bias


class LayerNormLinear(Linear):
    """RMSNorm, then `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        if normalization != "RMSNorm" or zero_centered_gamma or return_layernorm_output:
            raise NotImplementedError(f"{normalization} has no stand-in")
        super().__init__(in_features, out_features, **options)
        self.eps = eps
        dtype, device = self.weight.dtype, self.weight.device
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``[S, B, in]`` to ``[S, B, out]``."""
        return super().forward(torch.nn.functional.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps))


class GroupedLinear(_Weights):
    """One weight an expert, each for its own run of rows."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        if bias:
            raise NotImplementedError("experts' biases have no stand-in")
        names = [f"weight{i}" for i in range(num_gemms)]
        super().__init__(names, in_features, out_features, bias=False, **options)
        self.num_gemms = num_gemms
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """None to make."""

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        """``[n, in]`` to ``[n, out]``: `m_splits` rows for each expert in turn."""
        parts = inp.split(m_splits)
        return torch.cat([part @ getattr(self, f"weight{i}").t() for i, part in enumerate(parts)])
