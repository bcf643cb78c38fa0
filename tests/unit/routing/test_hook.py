"""One router's hook by value: values, gradients, who is counted, and both calls of a layer that is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_sspo.routing.hook import Action, RouterHook, Target

SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.9, 0.1, 0.2, 0.3], [0.0, 1.0, 2.0, 3.0]])
GIVEN = torch.tensor([[3, 0], [0, 3], [255, 255]], dtype=torch.uint8)
ROUTED = torch.tensor([True, True, False])


def top_k(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = scores.topk(2, dim=-1)
    return values, ids


def replaying(training: bool = False) -> RouterHook:
    hook = RouterHook(layer=7, place=0)
    hook.begin(Action.REPLAY, training)
    hook.target = Target(GIVEN, ROUTED, ROUTED)
    return hook


def test_given_experts_are_taken_and_others_are_the_routers_own():
    values, ids = replaying().choose(SCORES, top_k)
    assert ids.tolist() == [[3, 0], [0, 3], [3, 2]]
    torch.testing.assert_close(values, torch.tensor([[0.2, 0.1], [0.9, 0.3], [3.0, 2.0]]))


def test_values_are_differentiable_in_the_live_scores():
    scores = SCORES.clone().requires_grad_()
    values, _ = replaying().choose(scores, top_k)
    (values * torch.tensor([[1.0, 2.0]])).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[2, 0, 0, 1], [1, 0, 0, 2], [0, 0, 2, 1]]


def test_what_is_counted():
    """Token 0 was given two experts that the router would not choose, token 1 none, token 2 has no route."""
    hook = replaying()
    hook.choose(SCORES, top_k)
    assert (int(hook.replayed), int(hook.differing), hook.calls) == (2, 2, 1)
    hook.target = Target(GIVEN, ROUTED, torch.tensor([False, True, False]))  # the first is padding
    hook.choose(SCORES, top_k)
    assert (int(hook.replayed), int(hook.differing), hook.calls) == (3, 2, 2)


def test_a_target_is_good_for_one_forward_pass():
    hook = replaying()
    hook.choose(SCORES, top_k)
    with pytest.raises(RuntimeError, match="router of layer 7: got 3 tokens, but routes for none"):
        hook.choose(SCORES, top_k)


def test_another_number_of_tokens_is_refused():
    with pytest.raises(RuntimeError, match="layer 7: got 2 tokens, but routes for 3"):
        replaying().choose(SCORES[:2], top_k)


def test_recorded_is_what_was_chosen():
    hook = RouterHook(1, 0)
    hook.begin(Action.RECORD)
    _, ids = hook.choose(SCORES, top_k)
    assert torch.equal(hook.recorded[0], ids)
    assert ids.tolist() == [[1, 2], [0, 3], [3, 2]]


def test_a_layer_that_is_computed_again_takes_the_same_experts():
    """Two micro-batches whose backward comes after both forward passes, as in a pipeline; counted once."""
    hook = replaying(training=True)
    seen: list[list] = []

    def layer(scores: Tensor) -> Tensor:
        values, ids = hook.choose(scores, top_k)
        seen.append(ids.tolist())
        return values

    losses = []
    for ids, routed in ((GIVEN, ROUTED), (GIVEN.flip(0), ROUTED.flip(0))):
        hook.target = Target(ids, routed, routed)
        losses.append(checkpoint(layer, SCORES.clone().requires_grad_(), use_reentrant=True).sum())
    assert hook.unfinished
    for loss in losses:
        loss.backward()
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]
    assert (hook.calls, int(hook.replayed)) == (2, 4)
    assert not hook.unfinished


def test_a_checkpoint_that_keeps_gradients_on_is_refused():
    """PyTorch's non-reentrant one, which Megatron-Core does not use: both of its calls look alike."""
    hook = replaying(training=True)
    scores = SCORES.clone().requires_grad_()
    loss = checkpoint(lambda s: hook.choose(s, top_k)[0], scores, use_reentrant=False).exp().sum()
    with pytest.raises(RuntimeError, match="routes for none"):
        loss.backward()


def test_a_forward_only_pass_waits_for_no_backward():
    hook = replaying(training=False)
    with torch.no_grad():
        hook.choose(SCORES, top_k)
    assert not hook.unfinished


def test_without_a_pass_the_router_is_left_alone():
    hook = RouterHook(1, 0)
    _, ids = hook.choose(SCORES, top_k)
    assert ids.tolist() == [[1, 2], [0, 3], [3, 2]]
    assert not hook.recorded
    assert hook.calls == 0
