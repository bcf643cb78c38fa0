"""Log-probs and entropy against a plain log-softmax, from logits and from hidden states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_sspo.parallel import IGNORE_INDEX, linear_logprobs, vocab_parallel_logprobs

Outputs = tuple[Tensor, Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]


def make(rows: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Hidden, weight and targets; every third target is padding."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[2::3] = IGNORE_INDEX
    return states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def reference(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Outputs:
    logs = torch.log_softmax(logits / temperature, dim=-1)
    kept = targets != IGNORE_INDEX
    logprobs = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return logprobs * kept, -(logs.exp() * logs).sum(-1) * kept


def padded(weight: Tensor, rows: int) -> Tensor:
    """`weight` and more rows, whose logits would be the largest by far."""
    generator = torch.Generator().manual_seed(1)
    more = 50 * torch.randn(rows, weight.shape[1], generator=generator, dtype=torch.float64)
    return torch.cat([weight, more.to(weight.dtype)])


def from_logits(hidden: Tensor, weight: Tensor, targets: Tensor, **options: float) -> Outputs:
    return vocab_parallel_logprobs(hidden @ weight.T, targets, **options)


def from_small_tiles(hidden: Tensor, weight: Tensor, targets: Tensor, **options: float) -> Outputs:
    return linear_logprobs(hidden, weight, targets, chunk_size=1, **options)


WAYS = pytest.mark.parametrize("way", [linear_logprobs, from_small_tiles, from_logits])


def gradients(outputs: Outputs, inputs: tuple[Tensor, ...], of: str = "both") -> tuple[Tensor, ...]:
    """Gradients of a weighted sum of log-probs, of entropies, or of both."""
    weights = torch.linspace(-1, 2, outputs[0].numel(), dtype=torch.float64).to(outputs[0].dtype).view_as(outputs[0])
    terms = {"logprobs": outputs[0] * weights, "entropy": outputs[1] * weights.flip(0)}
    return torch.autograd.grad(sum(term.sum() for name, term in terms.items() if of in (name, "both")), inputs)


def assert_all_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_by_hand() -> None:
    """Probabilities 1/8, 1/8, 1/4, 1/2."""
    logits = torch.tensor([[0.0, 0.0, 2.0, 4.0]], dtype=torch.float64) * torch.log(torch.tensor(2.0).double()) / 2
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([2]))
    log2 = torch.log(torch.tensor(2.0).double())
    torch.testing.assert_close(logprobs, -2 * log2.view(1))
    torch.testing.assert_close(entropy, (3 / 8 + 3 / 8 + 2 / 4 + 1 / 2) * log2.view(1))
    (gradient,) = torch.autograd.grad(logprobs, logits)
    torch.testing.assert_close(gradient, torch.tensor([[-1 / 8, -1 / 8, 3 / 4, -1 / 2]], dtype=torch.float64))


@WAYS
@pytest.mark.parametrize("of", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_plain_log_softmax(way: Callable[..., Outputs], of: str, temperature: float) -> None:
    hidden, weight, targets = make(7, 5, 301)
    expected = reference(hidden @ weight.T, targets, temperature)
    actual = way(hidden, weight, targets, temperature=temperature)
    assert_all_close(actual, expected, 1e-12)
    assert_all_close(gradients(actual, (hidden, weight), of), gradients(expected, (hidden, weight), of), 1e-12)


def test_logits_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = make(7, 5, 301)
    expected = gradients(reference(hidden @ weight.T, targets), (hidden, weight))
    monkeypatch.setattr("nemo_sspo.parallel.logprobs._TILE_SIZE", 7 * 40)
    actual = from_logits(hidden, weight, targets)
    assert_all_close(actual, reference(hidden @ weight.T, targets), 1e-12)
    assert_all_close(gradients(actual, (hidden, weight)), expected, 1e-12)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 12),
    hidden=st.integers(1, 6),
    vocab=st.integers(1, 300),
    chunk_size=st.none() | st.integers(1, 20),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 99),
    padding=st.integers(0, 200),
)
def test_any_shape_and_chunk_size(
    rows: int, hidden: int, vocab: int, chunk_size: int | None, temperature: float, seed: int, padding: int
) -> None:
    states, weight, targets = make(rows, hidden, vocab, seed=seed)
    expected = reference(states @ weight.T, targets, temperature)
    wide, vocab_size = padded(weight, padding), vocab if padding else None
    actual = linear_logprobs(states, wide, targets, None, chunk_size, temperature, vocab_size)
    assert_all_close(actual, expected, 1e-11)
    assert_all_close(gradients(actual, (states, weight)), gradients(expected, (states, weight)), 1e-11)


@pytest.mark.parametrize("of", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("vocab", [1, 43, 44, 200, 300, 301])
@pytest.mark.parametrize("chunk_size", [None, 1, 3])  # tiles of 301, 43 and 128 columns
def test_rows_of_padding_take_no_part(of: str, vocab: int, chunk_size: int | None) -> None:
    hidden, weight, targets = make(7, 5, vocab)
    wide = padded(weight, 301 - vocab).detach().requires_grad_()
    masked = (hidden @ wide.T).masked_fill(torch.arange(301) >= vocab, -1e30)
    expected = reference(masked, targets, 0.6)
    actual = linear_logprobs(hidden, wide, targets, chunk_size=chunk_size, temperature=0.6, vocab_size=vocab)
    assert_all_close(actual, expected, 1e-12)
    grad_hidden, grad_weight = gradients(actual, (hidden, wide), of)
    assert_all_close((grad_hidden, grad_weight), gradients(expected, (hidden, wide), of), 1e-12)
    assert (grad_weight[vocab:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_padding_take_no_part_in_lower_precision(dtype: torch.dtype) -> None:
    hidden, weight, targets = make(24, 32, 1000, dtype)
    wide = padded(weight, 77).detach().requires_grad_()
    actual = linear_logprobs(hidden, wide, targets, chunk_size=2, vocab_size=1000)
    expected = linear_logprobs(hidden, weight, targets, chunk_size=2)
    assert_all_close(actual, expected, 1e-5)
    grad_hidden, grad_weight = gradients(actual, (hidden, wide))
    assert (grad_weight[1000:] == 0).all()
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    assert_all_close((grad_hidden, grad_weight[:1000]), gradients(expected, (hidden, weight)), tolerance)


@WAYS
def test_gradcheck(way: Callable[..., Outputs]) -> None:
    hidden, weight, targets = make(4, 3, 9)
    assert torch.autograd.gradcheck(lambda h, w: way(h, w, targets, temperature=0.8), (hidden, weight))


@WAYS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision(way: Callable[..., Outputs], dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = make(24, 32, 1000, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = reference(exact[0] @ exact[1].T, targets)
    actual = way(hidden, weight, targets)
    scale = 3.0 if way is from_logits else 1.0  # there the logits themselves were rounded
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=scale * tolerance, atol=scale * tolerance)
    pairs = zip(gradients(actual, (hidden, weight)), gradients(expected, tuple(exact)), strict=True)
    for one, other in pairs:
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= scale * tolerance * other.norm()


def test_bfloat16_is_accumulated_in_float32() -> None:
    """From hidden states only the inputs and the gradients are rounded, whatever is summed in between."""
    hidden, weight, targets = make(64, 64, 2000, torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    actual = linear_logprobs(hidden, weight, targets, chunk_size=1)
    expected = linear_logprobs(wide[0], wide[1], targets)
    assert_all_close(actual, expected, 1e-5)
    pairs = zip(gradients(actual, (hidden, weight)), gradients(expected, tuple(wide)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.float(), other, rtol=2**-8, atol=1e-6)


@WAYS
def test_padding_has_no_value_and_no_gradient(way: Callable[..., Outputs]) -> None:
    hidden, weight, targets = make(6, 4, 50)
    outputs = way(hidden, weight, targets)
    padding = targets == IGNORE_INDEX
    assert padding.sum() == 2
    for output in outputs:
        assert (output[padding] == 0).all() and (output[~padding] != 0).all()
    grad_hidden, grad_weight = gradients(outputs, (hidden, weight))
    assert (grad_hidden[padding] == 0).all()
    kept = hidden.detach()[~padding].requires_grad_()
    weights = torch.linspace(-1, 2, 6, dtype=torch.float64)
    logprobs, entropy = way(kept, weight, targets[~padding])
    loss = logprobs @ weights[~padding] + entropy @ weights.flip(0)[~padding]
    torch.testing.assert_close(grad_weight, torch.autograd.grad(loss, weight)[0], rtol=1e-12, atol=1e-12)


@WAYS
def test_only_padding_is_a_differentiable_zero(way: Callable[..., Outputs]) -> None:
    hidden, weight, targets = make(3, 4, 50)
    outputs = way(hidden, weight, torch.full_like(targets, IGNORE_INDEX))
    assert all((output == 0).all() for output in outputs)
    assert all((gradient == 0).all() for gradient in gradients(outputs, (hidden, weight)))


@WAYS
def test_no_tokens_is_a_differentiable_zero(way: Callable[..., Outputs]) -> None:
    hidden, weight, targets = make(0, 4, 50)
    outputs = way(hidden, weight, targets)
    assert all(output.shape == (0,) for output in outputs)
    grad_hidden, grad_weight = gradients(outputs, (hidden, weight))
    assert grad_hidden.shape == (0, 4) and (grad_weight == 0).all() and grad_weight.shape == (50, 4)


@WAYS
def test_large_logits_stay_finite(way: Callable[..., Outputs]) -> None:
    hidden, weight, targets = make(9, 4, 400, torch.float32)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    outputs = way(hidden, weight, targets)
    expected = reference((hidden.double() @ weight.double().T), targets)
    torch.testing.assert_close(outputs[0].double(), expected[0], rtol=1e-5, atol=1e-1)
    assert all(torch.isfinite(tensor).all() for tensor in (*outputs, *gradients(outputs, (hidden, weight))))


def test_masked_logits() -> None:
    """An entry of -inf takes no part: as if the vocabulary were smaller."""
    logits = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 1, 2], [3, 4, IGNORE_INDEX]])
    masked = torch.cat([torch.full((2, 3, 300), -torch.inf).double(), logits], dim=-1)
    actual = vocab_parallel_logprobs(masked, torch.where(targets >= 0, targets + 300, targets))
    expected = reference(logits, targets)
    assert_all_close(actual, expected, 1e-12)
    (gradient,) = gradients(actual, (masked,))
    assert (gradient[..., :300] == 0).all()
    assert_all_close((gradient[..., 300:],), gradients(expected, (logits,)), 1e-12)
    logprobs, _ = vocab_parallel_logprobs(masked, torch.zeros_like(targets))
    assert (logprobs == -torch.inf).all()


def test_logits_keep_their_leading_shape_and_are_not_written_to() -> None:
    logits = torch.randn(3, 2, 700, dtype=torch.float32).transpose(0, 1).requires_grad_()
    before = logits.detach().clone()
    targets = torch.randint(700, (2, 3), dtype=torch.int32)
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, temperature=0.5)
    assert logprobs.shape == entropy.shape == (2, 3)
    gradients((logprobs, entropy), (logits,))
    assert torch.equal(logits, before)
    assert_all_close((logprobs, entropy), reference(logits, targets.long(), 0.5), 1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_is_asked_for_has_a_gradient(frozen: int) -> None:
    *both, targets = make(20, 4, 30)
    expected = gradients(reference(both[0] @ both[1].T, targets), tuple(both))[1 - frozen]
    both[frozen] = both[frozen].detach()
    with Largest(*both) as seen:
        (actual,) = gradients(linear_logprobs(both[0], both[1], targets, chunk_size=1), (both[1 - frozen],))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert seen.elements == both[1 - frozen].numel()  # no gradient of the frozen weight is made, which is larger


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made; views of ``inputs`` are not made."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.elements = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_more_than_chunk_size_rows_of_logits(dtype: torch.dtype) -> None:
    rows, hidden, vocab, chunk_size = 64, 2, 1000, 4
    states, weight, targets = make(rows, hidden, vocab, dtype)

    def largest(way: Callable[..., Outputs], **options: int) -> int:
        with Largest(states, weight) as seen:
            gradients(way(states, weight, targets, **options), (states, weight))
        return seen.elements

    assert largest(linear_logprobs, chunk_size=chunk_size) <= chunk_size * vocab
    assert largest(linear_logprobs) == rows * vocab  # the test sees what it looks for
    assert largest(from_logits) == rows * vocab


def test_a_wide_hidden_state_does_not_widen_the_tile() -> None:
    """In bfloat16 a part of the weight is converted: with few tokens that must not become all of it."""
    states, weight, targets = make(2, 100, 1000, torch.bfloat16)
    with Largest(states, weight) as seen:
        linear_logprobs(states.detach(), weight.detach(), targets, chunk_size=4)
    assert seen.elements <= 4 * 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"hidden \(3, 5\), weight \(10, 4\)"),
        ({"hidden": torch.zeros(3, 1, 4)}, r"hidden \(3, 1, 4\), weight \(10, 4\)"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"hidden \(3, 4\), targets \(2,\)"),
        ({"weight": torch.zeros(10, 4, dtype=torch.bfloat16)}, r"hidden torch.float32, weight torch.bfloat16"),
        ({"targets": torch.tensor([1, 10, 12])}, r"\[0, 10\) or -100 for padding: got 10 at \[1\], 2 such in all"),
        ({"targets": torch.tensor([1, 2, -1])}, r"got -1 at \[2\], 1 such in all"),
        ({"targets": torch.zeros(3)}, "int64 or int32 token ids, got torch.float32"),
        ({"vocab_size": 0}, r"vocab_size must be in \[1, 10\], the rows of the weight on all ranks, got 0"),
        ({"vocab_size": -1}, r"vocab_size must be in \[1, 10\], .* got -1"),
        ({"vocab_size": 11}, r"vocab_size must be in \[1, 10\], .* got 11"),
        ({"vocab_size": 9}, r"\[0, 9\) or -100 for padding: got 9 at \[1\], 1 such in all"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be a positive number, got nan"),
    ],
)
def test_wrong_input_to_linear(change: dict, message: str) -> None:
    given = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(10, 4), "targets": torch.tensor([0, 9, -100])}
    linear_logprobs(**given)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**(given | change))


def test_wrong_input_to_logits() -> None:
    logits = torch.zeros(2, 3, 10)
    with pytest.raises(ValueError, match=r"logits \(2, 3, 10\), targets \(3, 2\)"):
        vocab_parallel_logprobs(logits, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got 77 at \[1, 2\]"):
        vocab_parallel_logprobs(logits, torch.tensor([[0, 1, 2], [3, 4, 77]]))
