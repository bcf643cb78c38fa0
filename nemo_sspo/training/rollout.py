"""One rollout: sample G responses a prompt, reward them, and say how much better than its group each one was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

from nemo_sspo.data.batches import sequence_batch
from nemo_sspo.data.dataset import EncodedProblem
from nemo_sspo.data.responses import RESPONSE, ResponseBatch
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.environment import score, uses_think_block
from nemo_sspo.errors import RunError
from nemo_sspo.generation import GenerationEngine, GenerationOutput, SamplingParams
from nemo_sspo.objective import group_advantages
from nemo_sspo.parallel.reductions import all_gather_list, all_gather_rows, local_share
from nemo_sspo.routing import RouteFormat, gather_routes, load_imbalance
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


def sampling_params(tokenizer: Tokenizer, max_tokens: int, temperature: float, vocab_size: int = 0) -> SamplingParams:
    """How responses to this tokenizer's prompts are sampled: up to its end token, and never padding.

    Nor ids that a model of `vocab_size` has beyond the tokenizer's: no text belongs to them.
    """
    forbidden = (tokenizer.pad_id, *range(tokenizer.vocab_size, vocab_size))
    return SamplingParams(max_tokens, temperature, stop_id=tokenizer.eos_id, forbidden_ids=forbidden)


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
    routing_replay: str = "none",
) -> Rollout:
    """Sample, reward and rate `samples_per_prompt` responses to each of P `problems`; P*G rows on every rank.

    Each data-parallel rank generates for its share of the problems. Row i draws from ``(seed, step, i)``, so a rollout
    does not depend on how many ranks there are. With `routing_replay` R2 the routes of the old-log-prob pass go with
    the rollout, with R3 the engine's, which the old-log-prob pass replays.

    Raises:
        RunError: R3, and the engine gave no routes for a response; on every rank alike.
    """
    dp = groups.dp_cp
    rows = [problem for problem in problems for _ in range(samples_per_prompt)]
    share = local_share(len(problems), dp)
    mine = range(share.start * samples_per_prompt, share.stop * samples_per_prompt)
    prompts = [rows[i].prompt_ids for i in mine]
    wanted = replace(sampling, return_routes=routing_replay == "R3")
    outputs = engine.generate(prompts, wanted, [sample_seed(seed, "rollout", step, i) for i in mine])

    local = sequence_batch(prompts, [o.token_ids for o in outputs], tokenizer.pad_id)
    reference = None
    if actor.has_reference:  # it routes by itself
        with actor.reference():
            reference, _ = actor.logprobs(local, forward_micro_batch_size, sampling.temperature)
    if routing_replay == "R2":
        old_logprobs, entropy, routes = actor.record_routes(local, forward_micro_batch_size, sampling.temperature)
    else:
        routes = _engine_routes(engine, actor, prompts, outputs, dp) if routing_replay == "R3" else None
        local = replace(local, routes=routes)
        old_logprobs, entropy = actor.logprobs(local, forward_micro_batch_size, sampling.temperature)
    texts = [tokenizer.decode(o.token_ids) for o in outputs]
    scores = score(texts, [rows[i].gold for i in mine])

    outputs = [replace(o, routes=None) for o in outputs]  # those travel as bytes
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
        routes=None if routes is None else gather_routes(routes, dp),
    )


def _engine_routes(
    engine: GenerationEngine,
    actor: Actor,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[GenerationOutput],
    dp: ProcessGroup,
) -> list[Tensor]:
    """The engine's routes in storage, checked. All ranks refuse together, so that none waits for another."""
    assert actor.routing is not None, "R3 needs an actor with routing replay"
    name, form = type(engine).__name__, actor.routing.form
    packed, complaints = [], []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens = len(prompt) + len(output.token_ids)
        if output.routes is None:
            complaints.append(
                f"{name} gave no routes for response {i} of {len(outputs)}, although it was asked for them"
            )
        elif len(output.routes) > tokens:
            complaints.append(
                f"{name} gave {len(output.routes)} rows of routes for the {tokens} tokens of response {i}"
            )
        else:
            try:
                packed.append(form.pack(output.routes, f"{name}, response {i}"))
            except ValueError as error:
                complaints.append(str(error))
    complaints = all_gather_list(complaints[:1], dp)
    if complaints:
        raise RunError(
            f"model.grpo.routing_replay.mode=R3: {complaints[0]}; turn its routes on, or set "
            "model.grpo.routing_replay.mode=R2, which needs none of the engine"
        )
    return packed


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


def routing_metrics(rollout: Rollout, form: RouteFormat) -> dict[str, float]:
    """What is known of a rollout's routes before they are replayed; nothing without routing replay."""
    if rollout.routes is None:
        return {}
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    routed = sum(int(form.has_route(routes).all(-1).sum()) for routes in rollout.routes)
    stored = sum(routes.numel() * routes.element_size() for routes in rollout.routes)
    return {
        "routing/load_imbalance": load_imbalance(rollout.routes, form),
        "routing/live_tokens": sum(lengths) - routed,  # they have no route: the router chooses
        "routing/bytes_per_token": stored / max(sum(len(routes) for routes in rollout.routes), 1),
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
