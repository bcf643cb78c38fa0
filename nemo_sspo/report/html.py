"""One run as a page: ``report.html`` holds everything within itself, and the figures also go to ``plots/``."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from nemo_sspo.errors import UserError
from nemo_sspo.report.compare import compare
from nemo_sspo.report.data import RunData, load_run
from nemo_sspo.report.figures import PLOTS, available, figure, overview
from nemo_sspo.report.jsonl import write_text
from nemo_sspo.report.style import png, theme
from nemo_sspo.report.text import flatten, number, points, seconds

_KEY_OPTIONS = (
    "model.seed", "model.grpo.objective", "model.grpo.sampling_params", "model.grpo.length_params.max_length",
    "trainer.sft.max_steps", "trainer.grpo.max_steps", "trainer.grpo.num_prompts_per_grpo_step",
    "trainer.grpo.samples_per_prompt", "trainer.grpo.optimizer_steps_per_rollout", "model.global_batch_size",
    "model.micro_batch_size", "model.optim.lr", "model.optim.sched.name", "model.optim.sched.min_lr",
    "trainer.grpo.gradient_clip_val", "model.num_layers", "model.hidden_size", "model.num_attention_heads",
    "model.num_query_groups", "model.num_moe_experts", "model.moe_router_topk", "model.moe_ffn_hidden_size",
    "model.tokenizer", "model.data.data_prefix", "model.data.synthetic.task",
)  # fmt: skip

_VALIDATION_COLUMNS = {
    "rollout": "rollout", "split": "split", "pass_at_1": "pass@1", "sampled_accuracy": "sampled accuracy",
    "format": "format", "think_fraction": "uses think", "pass_at_1_with_think": "pass@1 with think",
    "pass_at_1_without_think": "pass@1 without", "response_length/mean": "length", "num_problems": "problems",
}  # fmt: skip


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and ``plots/*.png`` into a run's folder; returns the report's path.

    The run may be finished, in progress or killed: what it has not come to is left out.

    Raises:
        UserError: the folder is no run's, a file in it is broken, or it cannot be written to.
    """
    run = load_run(folder)
    names = available(run)
    images = [_image(PLOTS[name].title, PLOTS[name].note, lambda name=name: figure(run, name)) for name in names]
    page = _render(
        "report.html.jinja",
        name=run.name,
        status=_status(run),
        cards=_cards(run),
        think=_think_table(run),
        figures=images,
        validation=_validation_table(run),
        samples=[{**sample, "reward": number(sample.get("reward"))} for sample in _some_samples(run)],
        config=flatten({key: value for key in _KEY_OPTIONS if (value := run.option(key)) is not None}),
        environment=flatten(run.environment),
    )
    try:
        plots = run.folder / "plots"
        plots.mkdir(exist_ok=True)
        for name, image in zip(names, images, strict=True):
            (plots / f"{name}.png").write_bytes(base64.b64decode(image["light"]))
        if names:
            with theme("light"):
                (plots / "overview.png").write_bytes(png(overview(run)))
        return write_text(run.folder / "report.html", page)
    except OSError as error:
        raise UserError(f"{run.folder}: the report cannot be written ({error.strerror}); make it writable") from None


def write_comparison(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write a page that shows several runs side by side to the file `out`; returns its path.

    Runs whose configurations differ only by ``model.seed`` are drawn in one colour with their median.

    Raises:
        UserError: a folder is no run's, a file in it is broken, or `out` cannot be written.
    """
    content = compare([load_run(folder) for folder in folders])
    images = [_image(title, "", draw) for title, draw in content.pop("drawings")]
    page = _render("comparison.html.jinja", figures=images, **content)
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        return write_text(out, page)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}); name an HTML file in a folder of yours"
        ) from None


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,  # responses are a model's: anything may be in them
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _image(title: str, note: str, draw: Callable[[], Figure]) -> dict[str, str]:
    image = {"title": title, "note": note}
    for name in ("light", "dark"):
        with theme(name):
            image[name] = base64.b64encode(png(draw())).decode("ascii")
    return image


def _status(run: RunData) -> str:
    done, total = (run.metrics[-1]["rollout"] if run.metrics else 0), run.option("trainer.grpo.max_steps", "?")
    parts = [f"{run.option('model.grpo.objective.name', '?')} objective", f"{done} of {total} rollouts"]
    if not run.metrics and run.cold_start:
        parts.append(f"cold start, step {run.cold_start[-1]['step']} of {run.option('trainer.sft.max_steps', '?')}")
    if not run.summary:
        parts.append("not finished: these are the numbers so far")
    return " · ".join(parts)


def _cards(run: RunData) -> list[dict[str, str]]:
    outcome, cards = run.outcome, []

    def card(label: str, value: str, note: str, tone: str = "") -> None:
        cards.append({"label": label, "value": value, "note": note, "tone": tone})

    if outcome.before:
        card("pass@1 before GRPO", number(outcome.before["pass_at_1"]), f"greedy, {outcome.split} split")
    if outcome.after:
        note = f"greedy, {outcome.split} split, {outcome.after['rollout']} rollouts"
        card("pass@1 after GRPO", number(outcome.after["pass_at_1"]), note)
    if outcome.lift is not None:
        card("Lift of pass@1", points(outcome.lift), "absolute", "good" if outcome.lift > 0 else "bad")
    if run.summary.get("seconds") is not None:
        card(
            "Time",
            seconds(run.summary["seconds"]),
            f"{number(run.summary.get('samples_per_second'))} training responses/s",
        )
    return cards


def _think_table(run: RunData) -> dict[str, Any]:
    """The outcome split by whether a response uses its think block: what of the lift is learning to use it."""
    outcome = run.outcome
    keys = ("think_fraction", "pass_at_1_with_think", "pass_at_1_without_think", "pass_at_1")
    rows = [
        [when, *(number(record.get(key)) for key in keys)]
        for when, record in (("before GRPO", outcome.before), ("after", outcome.after))
        if record and record.get("think_fraction") is not None
    ]
    head = [outcome.split, "uses the think block", "pass@1 with it", "pass@1 without it", "pass@1"]
    return {"head": head, "rows": rows}


def _validation_table(run: RunData) -> dict[str, Any]:
    columns = {key: label for key, label in _VALIDATION_COLUMNS.items() if run.has("validation", key)}
    rows = [[number(record.get(key)) for key in columns] for record in run.validation]
    return {"head": list(columns.values()), "rows": rows}


def _some_samples(run: RunData) -> list[dict[str, Any]]:
    rollouts = sorted({sample["rollout"] for sample in run.samples})
    chosen = {rollouts[0], rollouts[len(rollouts) // 2], rollouts[-1]} if rollouts else set()
    return [{"gold": "", **sample} for sample in run.samples if sample["rollout"] in chosen]
