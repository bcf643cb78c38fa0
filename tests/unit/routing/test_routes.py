"""How routes are kept, and that no wrong one gets in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nemo_sspo.routing.routes import RouteFormat, from_bytes, load_imbalance, to_bytes


def form(experts: int = 8, topk: int = 2, layers: int = 3) -> RouteFormat:
    return RouteFormat(tuple(range(1, layers + 1)), experts, topk)


@pytest.mark.parametrize(
    ("experts", "topk", "dtype"),
    [
        (128, 8, torch.uint8),
        (256, 8, torch.uint8),
        (257, 8, torch.int16),
        (512, 10, torch.int16),
        (255, 1, torch.uint8),
        (256, 1, torch.int16),  # a single expert 255 would read as no route
    ],
)
def test_a_byte_an_expert_where_that_is_enough(experts, topk, dtype):
    assert form(experts, topk).dtype == dtype


def test_qwen3_30b_a3b_takes_384_bytes_a_token():
    assert form(experts=128, topk=8, layers=48).bytes_per_token == 384
    assert form(experts=512, topk=10, layers=48).bytes_per_token == 960


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, (1, 2, 3, 4)), (2, (1, 3)), ([0, 1, 1, 0], (2, 3)), ([0, 0, 0, 1], (4,))]
)
def test_dense_layers_keep_their_numbers(frequency, layers):
    config = SimpleNamespace(num_layers=4, moe_layer_freq=frequency, num_moe_experts=8, moe_router_topk=2)
    assert RouteFormat.of(config).layers == layers


@pytest.mark.parametrize("experts", [8, 256, 300])
def test_pack_keeps_ids_and_marks_tokens_without_a_route(experts):
    ids = torch.tensor([[[0, 1], [2, 3], [experts - 1, 0]], [[-1, -1], [4, 5], [-1, -1]]])
    packed = form(experts).pack(ids, "the engine")
    assert packed.dtype == form(experts).dtype
    assert form(experts).has_route(packed).tolist() == [[True, True, True], [False, True, False]]
    has = form(experts).has_route(packed)
    assert torch.equal(packed[has].long(), ids[has])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [[[0, 1], [2, 2]]],
            r"the engine: 1 \(token, layer\).*token 0 in layer 4 with experts \[2, 2\].*2 distinct",
        ),
        ([[[0, 1], [2, 8]]], r"token 0 in layer 4 with experts \[2, 8\].*from 0 to 7"),
        ([[[0, 1], [0, 1]], [[0, -1], [0, 1]]], r"token 1 in layer 2 with experts \[0, -1\]"),
        ([[[-2, -2], [0, 1]]], r"token 0 in layer 2 with experts \[-2, -2\]"),
        ([[[0, 1, 2], [0, 1, 2]]], r"got \(1, 2, 3\).*expected whole numbers \[tokens, 2 MoE layers, 2 experts\]"),
        ([[[0, 1]]], r"got \(1, 1, 2\)"),
        ([[[0.0, 1.0], [0.0, 1.0]]], "float32"),
    ],
)
def test_pack_refuses_what_no_router_chooses(ids, message):
    with pytest.raises(ValueError, match=message):
        RouteFormat((2, 4), 8, 2).pack(torch.tensor(ids), "the engine")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routes_travel_as_bytes(dtype):
    routes = torch.arange(-6, 6).view(2, 3, 2).to(dtype)
    data = to_bytes(routes.transpose(0, 1))  # not contiguous
    assert data.dtype == torch.uint8
    assert data.shape == (3, 2, 2 * dtype.itemsize)
    assert torch.equal(from_bytes(data, dtype), routes.transpose(0, 1))


def test_load_imbalance_by_hand():
    """Layer 1: loads 3 1 0 0, mean 1; layer 2: even but for the missing token."""
    routes = [torch.tensor([[[0], [0]], [[0], [1]]], dtype=torch.uint8)]
    routes += [torch.tensor([[[0], [2]], [[1], [255]]], dtype=torch.uint8)]
    assert load_imbalance(routes, RouteFormat((1, 2), 4, 1)) == pytest.approx((3.0 + 4 / 3) / 2)
