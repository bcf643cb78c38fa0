"""Generation by the policy itself: Megatron-Core's model in process, with its key-value cache.

Rows of different prompt lengths share a batch without left padding: all start at position 0, and a row whose prompt is
longer than what has been read so far is fed its next prompt token instead of a sampled one. Positions and routing are
therefore exactly those of the training pass. Finished rows leave the batch when they are half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.generation.protocol import GenerationOutput, SamplingParams

_COMPACT_BELOW = 0.5  # share of unfinished rows under which the batch is compacted


class NativeEngine:
    """Samples from a Megatron-Core ``GPTModel`` that holds the policy's live weights (so `refit` has nothing to do).

    `max_sequence_length` bounds prompt and response together; `batch_size` is how many rows run together.
    """

    def __init__(self, model: torch.nn.Module, max_sequence_length: int, batch_size: int) -> None:
        megatron_cpu.install()
        self.model = model
        self.max_sequence_length = max_sequence_length
        self.batch_size = batch_size

    def refit(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to do: the weights are the trainer's own."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationOutput]:
        """See `GenerationEngine.generate`. Prompts of like length run together; the order of the answers is kept."""
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds: one seed a prompt")
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: dict[int, GenerationOutput] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            # no_grad, not inference_mode: Megatron caches tensors (causal mask, RoPE) that a training pass then saves.
            with torch.no_grad():
                for start in range(0, len(order), self.batch_size):
                    rows = order[start : start + self.batch_size]
                    batch = self._generate_batch([prompts[i] for i in rows], sampling, [seeds[i] for i in rows])
                    outputs.update(zip(rows, batch, strict=True))
        finally:
            self.model.train(was_training)
        return [outputs[i] for i in range(len(prompts))]

    def _generate_batch(
        self, prompts: list[Sequence[int]], sampling: SamplingParams, seeds: list[int]
    ) -> list[GenerationOutput]:
        device = next(self.model.parameters()).device
        lengths = [len(p) for p in prompts]
        longest = max(lengths) + sampling.max_tokens
        if min(lengths) < 1 or longest > self.max_sequence_length:
            raise ValueError(
                f"prompts of {min(lengths)} to {max(lengths)} tokens and max_tokens={sampling.max_tokens}: a prompt "
                f"needs at least one token, and prompt and response at most {self.max_sequence_length} together"
            )
        prompt_lengths = torch.tensor(lengths, device=device)
        tokens = torch.full((len(prompts), longest), sampling.stop_id, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(list(prompt), device=device)
        logprobs = torch.zeros(tokens.shape, device=device)
        ends = (prompt_lengths + sampling.max_tokens).clone()  # one past the last token of each row
        noise = _noise(seeds, sampling.max_tokens).to(device) if sampling.temperature > 0 else None

        context = StaticInferenceContext(len(prompts), longest)
        live = torch.arange(len(prompts), device=device)  # rows in the key-value cache, in its order
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        read, position = 0, min(lengths)  # tokens in the cache; column to fill next
        while position < longest:
            logits = self._forward(context, tokens[live, read:position])
            read = position
            chosen, logprob = _choose(logits, sampling, noise, live, position - prompt_lengths[live])
            in_prompt = position < prompt_lengths[live]
            open_rows = ~in_prompt & ~done[live]
            tokens[live, position] = torch.where(open_rows, chosen, tokens[live, position])
            logprobs[live, position] = torch.where(open_rows, logprob, logprobs[live, position])
            position += 1
            stopped = open_rows & (chosen == sampling.stop_id)
            ends[live[stopped]] = position
            done[live] |= stopped | (position >= prompt_lengths[live] + sampling.max_tokens)
            keep = ~done[live]
            if not keep.any():
                break
            if keep.float().mean() < _COMPACT_BELOW:
                live = live[keep]
                _keep_rows(context, keep)
        bounds = enumerate(zip(lengths, ends.tolist(), strict=True))
        return [_output(tokens[i], logprobs[i], start, end, sampling.stop_id) for i, (start, end) in bounds]

    def _forward(self, context: StaticInferenceContext, tokens: Tensor) -> Tensor:
        """Logits ``[rows, V]`` float32 after `tokens` ``[rows, n]``, which are appended to the cache."""
        start, count = context.sequence_len_offset, tokens.shape[1]
        if start:
            context.enable_decode_mode()
        positions = torch.arange(start, start + count, device=tokens.device).expand(len(tokens), -1)
        logits = self.model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        context.sequence_len_offset += count
        return logits[:, -1].float()


def _noise(seeds: Sequence[int], tokens: int) -> Tensor:
    """[B, tokens] float64 uniform in [0, 1): row i comes from seed i alone."""
    rows = [torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)


def _choose(
    logits: Tensor, sampling: SamplingParams, noise: Tensor | None, rows: Tensor, column: Tensor
) -> tuple[Tensor, Tensor]:
    """Next token and its log-probability, ``[rows]`` each, from logits ``[rows, V]``.

    Sampling inverts the cumulative distribution at the row's own uniform number for its response token `column`, so one
    response is the same in any batch and on any rank.
    """
    if sampling.forbidden_ids:
        logits = logits.clone()
        logits[:, list(sampling.forbidden_ids)] = -torch.inf
    scores = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
    if noise is None:
        chosen = scores.argmax(-1)
    else:
        cumulative = scores.double().exp().cumsum(-1)
        threshold = noise[rows, column.clamp(0, noise.shape[1] - 1)] * cumulative[:, -1]
        chosen = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(1)
    return chosen, scores.gather(1, chosen[:, None]).squeeze(1)


def _keep_rows(context: StaticInferenceContext, keep: Tensor) -> None:
    """Drop finished rows from the key-value cache (``[S, B, groups, head]`` by layer)."""
    cache = context.key_value_memory_dict
    for layer, (key, value) in cache.items():
        cache[layer] = (key[:, keep].contiguous(), value[:, keep].contiguous())
    context.max_batch_size = int(keep.sum())


def _output(tokens: Tensor, logprobs: Tensor, start: int, end: int, stop_id: int) -> GenerationOutput:
    token_ids = tokens[start:end].tolist()
    return GenerationOutput(token_ids, logprobs[start:end].tolist(), finished=token_ids[-1] == stop_id)
