"""Accuracy on held-out problems: greedy pass@1 and the accuracy of one sample a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.distributed import ProcessGroup

from nemo_sspo.data.dataset import EncodedProblem
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.environment import score, uses_think_block
from nemo_sspo.generation import GenerationEngine, SamplingParams
from nemo_sspo.parallel.reductions import all_gather_list, local_share
from nemo_sspo.seeds import sample_seed


def answer_problems(
    engine: GenerationEngine,
    problems: Sequence[EncodedProblem],
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    group: ProcessGroup,
    seed: int,
) -> list[dict]:
    """One response a problem, scored, on every rank; each rank of `group` generates its share.

    Each is ``{"question", "gold", "response", "answer", "format", "think", "length"}``.
    """
    share = local_share(len(problems), group)
    mine = problems[share]
    seeds = [sample_seed(seed, "validation", i) for i in range(share.start, share.stop)]
    outputs = engine.generate([p.prompt_ids for p in mine], sampling, seeds)
    texts = [tokenizer.decode(o.token_ids) for o in outputs]
    scores = score(texts, [p.gold for p in mine])
    records = [
        {
            "question": p.question,
            "gold": p.gold,
            "response": text,
            "answer": s.answer,
            "format": s.format,
            "think": uses_think_block(text),
            "length": len(o.token_ids),
        }
        for p, o, text, s in zip(mine, outputs, texts, scores, strict=True)
    ]
    return all_gather_list(records, group)


def validate(
    engine: GenerationEngine,
    problems: Sequence[EncodedProblem],
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    group: ProcessGroup,
    seed: int,
) -> dict[str, float | None]:
    """Greedy pass@1, whole and split by use of the think block, and the accuracy of one sample a problem.

    The names are those of validation.jsonl. `sampling` gives the length limit and the sampled accuracy's temperature.
    """
    greedy = answer_problems(engine, problems, tokenizer, replace(sampling, temperature=0.0), group, seed)
    sampled = answer_problems(engine, problems, tokenizer, sampling, group, seed)
    return {
        "pass_at_1": _mean([r["answer"] for r in greedy]),
        "sampled_accuracy": _mean([r["answer"] for r in sampled]),
        "format": _mean([r["format"] for r in greedy]),
        "think_fraction": _mean([float(r["think"]) for r in greedy]),
        "pass_at_1_with_think": _mean([r["answer"] for r in greedy if r["think"]]),
        "pass_at_1_without_think": _mean([r["answer"] for r in greedy if not r["think"]]),
        "response_length/mean": _mean([r["length"] for r in greedy]),
        "num_problems": len(greedy),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
