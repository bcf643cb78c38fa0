"""One rollout: sample G responses a prompt, reward them, and say how much better than its group each one was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_sspo.data.batches import sequence_batch
from nemo_sspo.data.dataset import EncodedProblem
from nemo_sspo.data.responses import RESPONSE, ResponseBatch
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.environment import score, uses_think_block
from nemo_sspo.generation import GenerationEngine, GenerationOutput, SamplingParams
from nemo_sspo.objective import group_advantages
from nemo_sspo.parallel.reductions import all_gather_list, all_gather_rows, local_share
from nemo_sspo.seeds import sample_seed
from nemo_sspo.training.actor import Actor


@dataclass(frozen=True)
class Rollout(ResponseBatch):
    """The responses of one GRPO step, groups of G consecutive rows, the same on every rank."""

    rollout_logprobs: Tensor = field(metadata=RESPONSE)  # [B, T] by the generation engine
    old_logprobs: Tensor = field(metadata=RESPONSE)  # [B, T] by the actor, before the first optimizer step
    entropy: Tensor = field(metadata=RESPONSE)  # [B, T] of the actor's distribution, likewise
    answer_reward: Tensor  # [B]
    format_reward: Tensor  # [B]
    rewards: Tensor  # [B] their sum
    advantages: Tensor  # [B]
    finished: Tensor  # [B] bool: ended by itself, not cut at the longest length
    questions: list[str]
    responses: list[str]
    golds: list[str]
    reference_logprobs: Tensor | None = field(default=None, metadata=RESPONSE)  # [B, T], with a divergence in the loss


def sampling_params(tokenizer: Tokenizer, max_tokens: int, temperature: float) -> SamplingParams:
    """How responses to this tokenizer's prompts are sampled: up to its end token, and never padding."""
    return SamplingParams(max_tokens, temperature, stop_id=tokenizer.eos_id, forbidden_ids=(tokenizer.pad_id,))


def collect_rollout(
    actor: Actor,
    engine: GenerationEngine,
    problems: Sequence[EncodedProblem],
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    *,
    samples_per_prompt: int,
    advantages: str,
    forward_micro_batch_size: int,
    seed: int,
    step: int,
    groups: ProcessGroupCollection,
) -> Rollout:
    """Sample, reward and rate `samples_per_prompt` responses to each of P `problems`; P*G rows on every rank.

    Each data-parallel rank generates for its share of the problems. Row i draws from ``(seed, step, i)``, so a rollout
    does not depend on how many ranks there are.
    """
    dp = groups.dp_cp
    rows = [problem for problem in problems for _ in range(samples_per_prompt)]
    share = local_share(len(problems), dp)
    mine = range(share.start * samples_per_prompt, share.stop * samples_per_prompt)
    prompts = [rows[i].prompt_ids for i in mine]
    outputs = engine.generate(prompts, sampling, [sample_seed(seed, "rollout", step, i) for i in mine])

    local = sequence_batch(prompts, [o.token_ids for o in outputs], tokenizer.pad_id)
    old_logprobs, entropy = actor.logprobs(local, forward_micro_batch_size, sampling.temperature)
    reference = None
    if actor.has_reference:
        with actor.reference():
            reference, _ = actor.logprobs(local, forward_micro_batch_size, sampling.temperature)
    texts = [tokenizer.decode(o.token_ids) for o in outputs]
    scores = score(texts, [rows[i].gold for i in mine])

    everyone: list[tuple[Sequence[int], GenerationOutput, str, float, float]] = all_gather_list(
        [(p, o, t, s.answer, s.format) for p, o, t, s in zip(prompts, outputs, texts, scores, strict=True)], dp
    )
    answer = torch.tensor([e[3] for e in everyone])
    form = torch.tensor([e[4] for e in everyone])
    rewards = answer + form
    rated = group_advantages(rewards.view(len(problems), samples_per_prompt), kind=advantages).flatten()
    batch = sequence_batch([e[0] for e in everyone], [e[1].token_ids for e in everyone], tokenizer.pad_id)
    rollout_logprobs = pad_sequence([torch.tensor(e[1].logprobs) for e in everyone], batch_first=True)
    return Rollout(
        tokens=batch.tokens,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        rollout_logprobs=rollout_logprobs,
        old_logprobs=all_gather_rows(old_logprobs, dp).cpu(),
        entropy=all_gather_rows(entropy, dp).cpu(),
        answer_reward=answer,
        format_reward=form,
        rewards=rewards,
        advantages=rated,
        finished=torch.tensor([e[1].finished for e in everyone]),
        questions=[row.question for row in rows],
        responses=[e[2] for e in everyone],
        golds=[row.gold for row in rows],
        reference_logprobs=None if reference is None else all_gather_rows(reference, dp).cpu(),
    )


def rollout_metrics(rollout: Rollout, samples_per_prompt: int) -> dict[str, float]:
    """What a person wants to know of a rollout, under the names of metrics.jsonl."""
    grouped = rollout.rewards.view(-1, samples_per_prompt)
    mask = rollout.mask
    tokens = mask.sum().clamp(min=1)
    gap = ((rollout.rollout_logprobs - rollout.old_logprobs).abs() * mask).max()
    think = [uses_think_block(text) for text in rollout.responses]
    return {
        "reward/mean": float(rollout.rewards.mean()),
        "reward/std": float(rollout.rewards.std()),
        "reward/answer": float(rollout.answer_reward.mean()),
        "reward/format": float(rollout.format_reward.mean()),
        "groups/zero_advantage_fraction": float((grouped == grouped[:, :1]).all(1).float().mean()),
        "response_length/mean": float(rollout.response_lengths.float().mean()),
        "response_length/max": int(rollout.response_lengths.max()),
        "truncated_fraction": float((~rollout.finished).float().mean()),
        "entropy/mean": float((rollout.entropy * mask).sum() / tokens),
        "think_fraction": sum(think) / len(think),
        "rollout_logprob_gap/max": float(gap),
    }


def rollout_samples(rollout: Rollout, step: int, count: int) -> list[dict]:
    """`count` responses spread evenly over the rollout, as lines of samples.jsonl."""
    stride = max(len(rollout) // max(count, 1), 1)
    return [
        {
            "rollout": step,
            "prompt": rollout.questions[i],
            "response": rollout.responses[i],
            "gold": rollout.golds[i],
            "reward": float(rollout.rewards[i]),
            "answer": float(rollout.answer_reward[i]),
            "format": float(rollout.format_reward[i]),
        }
        for i in range(0, len(rollout), stride)[:count]
    ]
