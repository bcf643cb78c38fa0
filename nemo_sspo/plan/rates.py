"""What a GPU and its links can do, and the share of it that the estimate of time assumes is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, dense: per second, one direction."""

    name: str
    memory: float  # GiB
    bf16: float  # FLOP
    fp8: float  # FLOP
    hbm: float  # bytes
    nvlink: float  # bytes, within a node
    network: float  # bytes, a GPU's share between nodes
    host: float  # bytes, to host memory


# NVIDIA's data sheets of H100 SXM, H200 SXM and HGX B200. They print matrix rates with 2:4 sparsity (half of that is
# dense) and NVLink in both directions together (900 and 1,800 GB/s). A GPU has one 400 Gbit/s adapter in DGX H100, H200
# and B200, and PCIe 5.0 x16 to the host.
_TERA, _GIGA = 1e12, 1e9
GPUS = {
    "h100": Gpu("h100", 80, 989 * _TERA, 1979 * _TERA, 3.35 * _TERA, 450 * _GIGA, 50 * _GIGA, 64 * _GIGA),
    "h200": Gpu("h200", 140, 989 * _TERA, 1979 * _TERA, 4.8 * _TERA, 450 * _GIGA, 50 * _GIGA, 64 * _GIGA),
    "b200": Gpu("b200", 179, 2250 * _TERA, 4500 * _TERA, 8.0 * _TERA, 900 * _GIGA, 50 * _GIGA, 64 * _GIGA),
}
NODE = 8  # GPUs that NVLink joins

# Assumed, not measured. What large dense products, memory-bound kernels and collectives are commonly seen to reach.
MATMUL = 0.5
BANDWIDTH = 0.7
# A product of `rows` rows reaches rows / (rows + HALF_ROWS) of MATMUL: an expert that gets few tokens is slow.
HALF_ROWS = 128
TRAFFIC = 4  # times that each byte kept for the backward pass crosses to or from memory beside the products
ASSUMED = (
    f"assumed: {MATMUL:.0%} of the peak rate of matrix products, less for experts with few tokens; {BANDWIDTH:.0%} of "
    f"every bandwidth; NVLink within {NODE} GPUs, 400 Gbit/s a GPU beyond; no communication hidden behind computation; "
    "experts evenly loaded; generation not counted"
)
