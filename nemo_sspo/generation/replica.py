"""One replica of the policy, however it is split, as the generation loop sees it: tokens in, the next tokens out.

A replica is what has the same prompts: the ranks of ``groups.mp``, tensor times pipeline parallel. Several replicas may
share their experts; their forward passes then meet in the experts' all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_sspo.parallel.reductions import Group, any_rank

# What modules and configurations call sequence parallelism; the second is the embedding's.
_SEQUENCE_PARALLEL = ("sequence_parallel", "reduce_scatter_embeddings")

Choice = tuple[Tensor, Tensor]  # tokens and their log-probabilities, [rows] each


class Policy(Protocol):
    """What generation needs of `nemo_sspo.model.Policy`."""

    @property
    def chunks(self) -> Sequence[GPTModel]:
        """This rank's modules, one a virtual pipeline stage."""
        ...

    @property
    def vocab_size(self) -> int:
        """The tokenizer's ids; logits from there on are padding."""
        ...

    @property
    def groups(self) -> ProcessGroupCollection:
        """Megatron-Core's process groups."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...


class Replica:
    """This rank's part in the forward passes of its replica. All ranks of a replica make the same calls."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._companions = companions(policy.groups)

    def next_tokens(
        self, context: StaticInferenceContext, tokens: Tensor, choose: Callable[[Tensor], Choice]
    ) -> Choice:
        """What `choose` makes of the logits ``[rows, V]`` float32 after `tokens` ``[rows, n]``, joined to the cache.

        One rank chooses for its replica, so that rounding never lets two ranks go on with different tokens.
        """
        self._anyone(busy=True)
        logits = self._forward(context, tokens)
        groups = self._policy.groups
        if groups.mp.size() == 1:
            return choose(logits)
        if groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == 0:
            chosen, logprob = choose(logits)
            answer = torch.stack([chosen.double(), logprob.double()])  # exact: ids are far below 2**53
        else:
            answer = torch.empty(2, len(tokens), dtype=torch.float64, device=self._policy.device)
        # The pipeline's stages are the outer ranks of the group: its last stage begins tp.size() before the end.
        dist.broadcast(answer, group=groups.mp, group_src=groups.mp.size() - groups.tp.size())
        return answer[0].long(), answer[1].float()

    def accompany(self) -> None:
        """Take part in the forward passes of those who share this rank's experts, until they have no prompts left.

        With one token that no one reads: the experts' all-to-all needs every rank, but any number of tokens.
        """
        while self._anyone(busy=False):
            token = torch.zeros(1, 1, dtype=torch.int64, device=self._policy.device)
            self._forward(StaticInferenceContext(1, 1), token)

    def _anyone(self, busy: bool) -> bool:
        """Whether a rank that shares experts with this one, or this one, has prompts. A collective before each pass."""
        return busy if self._companions is None else any_rank(busy, self._companions)

    def _forward(self, context: StaticInferenceContext, tokens: Tensor) -> Tensor:
        """One pass through all stages: on the last stage the logits, on others what they gave or got last."""
        start, count = context.sequence_len_offset, tokens.shape[1]
        assert not start or count == 1, "behind a cache Megatron-Core's attention has no mask"
        if start:
            context.enable_decode_mode()
        positions = torch.arange(start, start + count, device=tokens.device).expand(len(tokens), -1)
        chunks, pipeline = self._policy.chunks, self._policy.groups.pp
        stages = pipeline.size() * len(chunks)
        carried: Tensor | None = None
        for stage in range(stages):
            if stage % pipeline.size() == pipeline.rank():
                chunk = chunks[stage // pipeline.size()]
                chunk.set_input_tensor(carried)  # type: ignore[arg-type]  (None: the first stage reads the tokens)
                carried = chunk(tokens, positions, None, inference_context=context, runtime_gather_output=True)
                chunk.set_input_tensor(None)  # type: ignore[arg-type]
            if stage < stages - 1 and pipeline.size() > 1:
                carried = self._hand_on(carried, stage, (count, len(tokens)))
        context.sequence_len_offset += count  # once for all chunks: they share the cache, by global layer number
        assert carried is not None
        last = pipeline.rank() == pipeline.size() - 1
        return carried[:, -1, : self._policy.vocab_size].float() if last else carried

    def _hand_on(self, carried: Tensor | None, stage: int, shape: tuple[int, int]) -> Tensor | None:
        """Hidden states ``[S, B, H]`` from the rank of `stage` to that of the next. One transfer at a time, in the
        order of the stages on every rank: nothing can wait in a circle, interleaved or not.
        """
        pipeline, config = self._policy.groups.pp, self._policy.chunks[0].config
        sender, receiver = stage % pipeline.size(), (stage + 1) % pipeline.size()
        if pipeline.rank() == sender:
            assert carried is not None
            dist.send(carried.contiguous(), group=pipeline, group_dst=receiver)
        elif pipeline.rank() == receiver:
            carried = torch.empty(*shape, config.hidden_size, dtype=config.pipeline_dtype, device=self._policy.device)
            dist.recv(carried, group=pipeline, group_src=sender)
        return carried


def companions(groups: ProcessGroupCollection) -> Group | None:
    """Those with whom this rank must make equally many forward passes although they have other prompts.

    The ranks that its experts are spread over, if they are more than one replica's. None where a replica has all its
    experts for itself: then nobody need agree. Both kinds of groups are runs of consecutive ranks in a pipeline stage;
    where neither holds the other they form chains, and the whole stage goes together.
    """
    dense, expert = groups.tp.size(), groups.tp_ep.size()
    if dense % expert == 0:
        return None
    return groups.tp_ep if expert % dense == 0 else groups.tp_dp_cp


@contextmanager
def generating(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Evaluation mode, no gradients and no sequence parallelism, which cannot split a single token; until the end.

    Megatron-Core's `set_model_to_sequence_parallel` is not used: it remembers modules by the `id` of their model, which
    another model may get later, and sets all flags alike, also those that were off for a reason.
    """
    modes = [chunk.training for chunk in chunks]
    holders = [h for chunk in chunks for m in chunk.modules() for h in (m, getattr(m, "config", None))]
    flags = [(holder, name) for holder in holders for name in _SEQUENCE_PARALLEL if getattr(holder, name, False)]
    try:
        for chunk in chunks:
            chunk.eval()
        for holder, name in flags:
            setattr(holder, name, False)
        # no_grad, not inference_mode: Megatron caches tensors (causal mask, RoPE) that a training pass then saves.
        with torch.no_grad():
            yield
    finally:
        for holder, name in flags:
            setattr(holder, name, True)
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
