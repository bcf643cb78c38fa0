"""Generation by the policy itself: Megatron-Core's model in process, with its key-value cache.

Rows of different prompt lengths share a batch without left padding: all start at position 0, and a row whose prompt is
longer than what has been read so far is fed its next prompt token instead of a sampled one. Positions and routing are
therefore exactly those of the training pass. Finished rows leave the batch when they are half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.generation.protocol import GenerationOutput, SamplingParams
from nemo_sspo.generation.replica import Choice, Policy, Replica, generating
from nemo_sspo.routing import RoutingReplay
from nemo_sspo.routing.hook import Action

_COMPACT_BELOW = 0.5  # share of unfinished rows under which the batch is compacted


class NativeEngine:
    """Samples from a policy with its live weights (so `refit` has nothing to do), under any layout.

    `max_sequence_length` bounds prompt and response together; `batch_size` is how many rows run together. It tells
    which experts it chose if it is given the policy's `routing`.
    """

    def __init__(
        self, policy: Policy, max_sequence_length: int, batch_size: int, routing: RoutingReplay | None = None
    ) -> None:
        megatron_cpu.install()
        self._policy, self._replica, self._routing = policy, Replica(policy), routing
        self.max_sequence_length = max_sequence_length
        self.batch_size = batch_size

    @property
    def returns_routes(self) -> bool:
        """Whether it can say which experts it chose."""
        return self._routing is not None

    def refit(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to do: the weights are the trainer's own."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationOutput]:
        """See `GenerationEngine.generate`. Prompts of like length run together; the order of the answers is kept.

        A collective: every rank calls it, those of one replica with the same prompts, another replica with its own,
        which may be fewer or none.
        """
        self._check(prompts, sampling, seeds)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: dict[int, GenerationOutput] = {}
        with generating(self._policy.chunks):
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                batch = _Batch([prompts[i] for i in rows], sampling, [seeds[i] for i in rows], self._policy.device)
                answers = _complete(batch, self._replica, self._routing if sampling.return_routes else None)
                outputs.update(zip(rows, answers, strict=True))
            self._replica.accompany()
        return [outputs[i] for i in range(len(prompts))]

    def _check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]) -> None:
        """Refuse what cannot be generated before the first pass, in which other ranks take part."""
        if sampling.return_routes and self._routing is None:
            raise ValueError("return_routes: this engine was built without `routing`, so it can't tell")
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds: one seed a prompt")
        lengths = [len(prompt) for prompt in prompts]
        if lengths and (min(lengths) < 1 or max(lengths) + sampling.max_tokens > self.max_sequence_length):
            raise ValueError(
                f"prompts of {min(lengths)} to {max(lengths)} tokens and max_tokens={sampling.max_tokens}: a prompt "
                f"needs at least one token, and prompt and response at most {self.max_sequence_length} together"
            )


class _Batch:
    """Rows that run together: their tokens so far, and which of them are still worked on."""

    def __init__(
        self, prompts: list[Sequence[int]], sampling: SamplingParams, seeds: list[int], device: torch.device
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self.longest = max(lengths) + sampling.max_tokens
        self.live = torch.arange(len(prompts), device=device)  # rows in the key-value cache, in its order
        self._sampling = sampling
        self._prompt_lengths = torch.tensor(lengths, device=device)
        self._limits = self._prompt_lengths + sampling.max_tokens
        self._tokens = torch.full((len(prompts), self.longest), sampling.stop_id, device=device)
        for row, prompt in enumerate(prompts):
            self._tokens[row, : len(prompt)] = torch.tensor(list(prompt), device=device)
        self._logprobs = torch.zeros(self._tokens.shape, device=device)
        self._ends = self._limits.clone()  # one past the last token of each row
        self._noise = _noise(seeds, sampling.max_tokens).to(device) if sampling.temperature > 0 else None
        self._done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self._routes: Tensor | None = None  # [B, S, layers of this rank, K] in storage
        self._read, self._position = 0, min(lengths)  # tokens in the cache; column to fill next

    def unread(self) -> Tensor:
        """The tokens ``[live rows, n]`` that the cache does not hold yet; from now on it does."""
        tokens = self._tokens[self.live, self._read : self._position]
        self._read = self._position
        return tokens

    def keep_routes(self, ids: Tensor) -> None:
        """The routes of what `unread` gave last, ``[n * live rows, layers, K]``, in the routers' order of tokens."""
        ids = ids.view(-1, len(self.live), *ids.shape[1:]).transpose(0, 1)  # [live rows, n, layers, K]
        if self._routes is None:
            self._routes = ids.new_zeros(len(self._ends), self.longest, *ids.shape[2:])
        self._routes[self.live, self._read - ids.shape[1] : self._read] = ids

    def routes(self, routing: RoutingReplay) -> list[Tensor]:
        """The routes of every row, of all layers, ``[tokens - 1, L, K]``: its last token was not read. A collective."""
        assert self._routes is not None
        lengths = (self._ends - 1).tolist()
        read = torch.cat([row[:n] for row, n in zip(self._routes, lengths, strict=True)])
        return [routes.clone() for routes in routing.all_layers(read).cpu().split(lengths)]

    def choose(self, logits: Tensor) -> Choice:
        """The live rows' next tokens."""
        column = self._position - self._prompt_lengths[self.live]
        return _choose(logits, self._sampling, self._noise, self.live, column)

    def fill(self, chosen: Tensor, logprob: Tensor) -> Tensor | None:
        """Fill the next column where the prompt has ended. A mask of the live rows if some leave the cache now."""
        live, position = self.live, self._position
        open_rows = (position >= self._prompt_lengths[live]) & ~self._done[live]
        self._tokens[live, position] = torch.where(open_rows, chosen, self._tokens[live, position])
        self._logprobs[live, position] = torch.where(open_rows, logprob, self._logprobs[live, position])
        self._position = position = position + 1
        stopped = open_rows & (chosen == self._sampling.stop_id)
        self._ends[live[stopped]] = position
        self._done[live] |= stopped | (position >= self._limits[live])
        keep = ~self._done[live]
        if keep.float().mean() >= _COMPACT_BELOW:
            return None
        self.live = live[keep]
        return keep

    def outputs(self, routes: list[Tensor] | None) -> list[GenerationOutput]:
        """The responses, by row."""
        bounds = enumerate(zip(self._prompt_lengths.tolist(), self._ends.tolist(), strict=True))
        outputs = [
            _output(self._tokens[i], self._logprobs[i], start, end, self._sampling.stop_id)
            for i, (start, end) in bounds
        ]
        return outputs if routes is None else [replace(o, routes=r) for o, r in zip(outputs, routes, strict=True)]


def _complete(batch: _Batch, replica: Replica, routing: RoutingReplay | None) -> list[GenerationOutput]:
    """Generate until every row has ended."""
    context = StaticInferenceContext(len(batch.live), batch.longest)
    with nullcontext() if routing is None else routing.taking_part(Action.RECORD):
        while len(batch.live):
            tokens = batch.unread()
            choice = replica.next_tokens(context, tokens, batch.choose)
            if routing is not None:
                batch.keep_routes(routing.take(tokens.numel()))
            keep = batch.fill(*choice)
            if keep is not None:
                _keep_rows(context, keep)
    return batch.outputs(None if routing is None else batch.routes(routing))


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
