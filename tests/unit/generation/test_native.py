"""The native engine against the model's own uncached forward pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nemo_sspo.generation import SamplingParams
from nemo_sspo.generation.native import NativeEngine
from nemo_sspo.generation.replica import Replica, companions, generating
from nemo_sspo.model import build_model
from tests.tiny import VOCAB, tiny_config

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [12, 13]]
PAD, STOP = 0, 1


def uncached_logprobs(policy, tokens: list[int], temperature: float = 1.0, forbidden: tuple[int, ...] = ()):
    """Log-probabilities [S, V] after every position of one sequence."""
    (model,) = policy.chunks
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None).float()[0, :, : policy.vocab_size]
    logits[:, list(forbidden)] = -torch.inf
    return (logits / temperature).log_softmax(-1)


def test_greedy_with_cache_equals_greedy_without(policy):
    engine = NativeEngine(policy, max_sequence_length=32, batch_size=3)  # two batches, uneven prompts in one
    sampling = SamplingParams(max_tokens=12, temperature=0.0, stop_id=STOP)
    outputs = engine.generate(PROMPTS, sampling, seeds=[0] * 4)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 12 and (tokens[-1] != STOP or len(tokens) == len(prompt)):
            tokens.append(int(uncached_logprobs(policy, tokens)[-1].argmax()))
        assert output.token_ids == tokens[len(prompt) :]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_at_the_sampling_temperature(policy, temperature):
    engine = NativeEngine(policy, max_sequence_length=32, batch_size=8)
    sampling = SamplingParams(10, temperature, STOP, forbidden_ids=(PAD,))
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, sampling, seeds=[1, 2, 3, 4]), strict=True):
        reference = uncached_logprobs(policy, prompt + output.token_ids, temperature, (PAD,))
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(output.token_ids) - 1)
        expected = reference[rows, output.token_ids]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)


def test_sampled_frequencies_match_probabilities(policy):
    engine = NativeEngine(policy, max_sequence_length=8, batch_size=4000)
    draws = 4000
    outputs = engine.generate([[5, 6]] * draws, SamplingParams(1, 1.0, STOP, (PAD,)), seeds=range(draws))
    counts = torch.bincount(torch.tensor([o.token_ids[0] for o in outputs]), minlength=24).double()
    probability = uncached_logprobs(policy, [5, 6], forbidden=(PAD,))[-1].double().exp()
    assert counts[PAD] == 0
    # Pearson's statistic against its distribution's mean and deviation: k-1 and sqrt(2(k-1)) for k cells.
    cells = probability * draws > 5
    statistic = ((counts - probability * draws) ** 2 / (probability * draws))[cells].sum()
    degrees = int(cells.sum()) - 1
    assert degrees > 5
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_a_response_does_not_depend_on_its_batch(policy):
    sampling = SamplingParams(16, 1.0, STOP, (PAD,))
    seeds = [11, 12, 13, 14]
    together = NativeEngine(policy, 32, batch_size=4).generate(PROMPTS, sampling, seeds)
    alone = NativeEngine(policy, 32, batch_size=1)
    for prompt, seed, output in zip(PROMPTS, seeds, together, strict=True):
        (single,) = alone.generate([prompt], sampling, [seed])
        assert single.token_ids == output.token_ids


def test_responses_end_at_the_stop_token_or_at_the_limit(policy):
    engine = NativeEngine(policy, 64, batch_size=64)
    outputs = engine.generate([[5]] * 64, SamplingParams(6, 1.0, STOP, (PAD,)), seeds=range(64))
    assert {o.finished for o in outputs} == {True, False}  # the seeds give both
    for output in outputs:
        assert STOP not in output.token_ids[:-1]
        assert output.finished == (output.token_ids[-1] == STOP)
        assert len(output.token_ids) == 6 or output.finished


def test_padding_of_the_vocabulary_is_never_chosen(groups):
    policy = build_model(tiny_config("model.make_vocab_size_divisible_by=32").model, VOCAB, groups)
    (model,) = policy.chunks
    assert model.output_layer.weight.shape[0] == 32 > VOCAB
    with torch.no_grad():  # one of the padding's logits or another is far above all others
        model.output_layer.weight[VOCAB:] *= 100
    engine = NativeEngine(policy, 16, batch_size=64)
    for temperature in (0.0, 1.0):
        for output in engine.generate([[5]] * 64, SamplingParams(4, temperature, STOP), seeds=range(64)):
            assert max(output.token_ids) < VOCAB
            assert min(output.logprobs) > -20


def test_several_tokens_behind_a_cache_are_refused(policy):
    """Megatron-Core would let each of them see those after it."""
    from megatron.core.inference.contexts import StaticInferenceContext

    context, replica = StaticInferenceContext(1, 8), Replica(policy)
    choose = lambda logits: (logits.argmax(-1), logits.amax(-1))  # noqa: E731
    with generating(policy.chunks):
        replica.next_tokens(context, torch.tensor([[3, 4]]), choose)
        with pytest.raises(AssertionError, match="no mask"):
            replica.next_tokens(context, torch.tensor([[5, 6]]), choose)


def test_no_prompts_need_no_pass(policy):
    assert NativeEngine(policy, 16, 1).generate([], SamplingParams(2, 0.0, STOP), []) == []


def test_the_model_keeps_its_mode(policy):
    engine = NativeEngine(policy, 16, 1)
    (model,) = policy.chunks
    for mode in (True, False):
        model.train(mode)
        engine.generate([[5]], SamplingParams(2, 0.0, STOP), [0])
        assert model.training is mode


def test_sequence_parallelism_is_off_within_and_as_before_after_an_error(policy):
    (model,) = policy.chunks
    experts = model.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1
    flagged = [(model.config, "sequence_parallel"), (model.output_layer, "sequence_parallel")]
    flagged.append((model.embedding.word_embeddings, "reduce_scatter_embeddings"))
    for holder, name in flagged:
        setattr(holder, name, True)
    model.train()
    with pytest.raises(RuntimeError, match="out of luck"), generating(policy.chunks):
        assert not any(getattr(holder, name) for holder, name in flagged)
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError("out of luck")
    assert all(getattr(holder, name) for holder, name in flagged)
    assert experts.sequence_parallel is False  # Megatron-Core turns it off where experts are not split
    assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("tp", "tp_ep", "expected"),
    [(1, 1, None), (2, 1, None), (2, 2, None), (4, 2, None), (1, 2, "tp_ep"), (2, 4, "tp_ep"), (2, 3, "tp_dp_cp")],
)
def test_companions_are_ranks_of_other_replicas_with_the_same_experts(tp, tp_ep, expected):
    groups = SimpleNamespace(tp=Sized(tp), tp_ep=Sized(tp_ep), tp_dp_cp=Sized(6))
    assert companions(groups) is (getattr(groups, expected) if expected else None)


class Sized:
    """A process group of so many ranks."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


def test_too_long_and_empty_prompts_are_refused(policy):
    engine = NativeEngine(policy, 8, 4)
    with pytest.raises(ValueError, match="at most 8 together"):
        engine.generate([[5] * 6], SamplingParams(3, 1.0, STOP), [0])
    with pytest.raises(ValueError, match="at least one token"):
        engine.generate([[]], SamplingParams(3, 1.0, STOP), [0])
    with pytest.raises(ValueError, match="one seed a prompt"):
        engine.generate([[5]], SamplingParams(3, 1.0, STOP), [])
