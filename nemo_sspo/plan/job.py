"""What is planned for: a run's config, or a model's alone with batches that are said here."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemo_sspo.config.load import load_config
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.config.search import config_dirs
from nemo_sspo.config.validate import shape_complaints
from nemo_sspo.errors import UserError
from nemo_sspo.plan.activations import Batch
from nemo_sspo.plan.memory import Job

ARITHMETIC_VOCABULARY = 27  # ids of the project's small tokenizer: nemo_sspo/data/tokenizer.py
_ELEMENT = {"32": 4, "bf16": 2}  # bytes by trainer.precision
# For a model's name alone: the batches of NeMo-RL's recipe for Qwen3-30B-A3B on 32 H100
# (NVIDIA-NeMo/RL, examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-4n8g.yaml and what it includes).
_RUN = """\
defaults: [model: {name}, _self_]
trainer:
  accelerator: gpu
  precision: bf16
  grpo: {{max_steps: 1, num_prompts_per_grpo_step: 64, samples_per_prompt: 32, optimizer_steps_per_rollout: 4,
    generation_rollout_mbs: 32}}
exp_manager: {{explicit_log_dir: results}}
model:
  encoder_seq_length: 4096
  micro_batch_size: 1
  global_batch_size: 512
  optim: {{name: mcore_distributed_optim, lr: 1.0e-6}}
  grpo: {{length_params: {{max_length: 4095}}, routing_replay: {{mode: {replay}}}}}
"""


def load_plan_config(name: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """The run config of that name, or one made around ``model/NAME.yaml``.

    Raises:
        UserError: there is neither, or a key or a value in it is wrong.
    """
    folders, stem = config_dirs(config_dir), name.removesuffix(".yaml")
    models = {path.stem: path for folder in reversed(folders) for path in (folder / "model").glob("*.yaml")}
    if stem not in models or any((folder / f"{stem}.yaml").is_file() for folder in folders):
        config = _run_config(name, overrides, config_dir, sorted(models))
    else:
        config = _around(models[stem], overrides)
    for complaint in shape_complaints(config):
        raise UserError(complaint)
    return config


def _run_config(name: str, overrides: Sequence[str], config_dir: str | Path | None, models: list[str]) -> RunConfig:
    try:
        return load_config(name, overrides, config_dir, read_pretrained=None)
    except UserError as error:
        if "no config named" not in str(error):
            raise
        raise UserError(f"{error}; models: {', '.join(models) or 'none'}") from None


def _around(model: Path, overrides: Sequence[str]) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        shutil.copy(model, Path(folder) / "model")
        experts = re.search(r"^num_moe_experts: *[0-9]", model.read_text(encoding="utf-8"), re.MULTILINE)
        text = _RUN.format(name=model.stem, replay="R3" if experts else "none")
        (Path(folder) / "plan.yaml").write_text(text, encoding="utf-8")
        return load_config("plan", overrides, folder)


def job_of(
    config: RunConfig, vocab_size: int | None = None, attention: str = "flash", generation_tp: int | None = None
) -> Job:
    """What `config` asks of the GPUs. `vocab_size` is the tokenizer's, needed where no key says it.

    Raises:
        UserError: the size of the vocabulary is not known.
    """
    grpo, model = config.trainer.grpo, config.model
    batch = Batch(
        sequence=model.encoder_seq_length,
        response=min(model.grpo.length_params.max_length, model.encoder_seq_length),
        step=model.global_batch_size,
        rollout=grpo.num_prompts_per_grpo_step * grpo.samples_per_prompt,
        rows=grpo.generation_rollout_mbs,
        element=_ELEMENT[config.trainer.precision],
        attention=attention,
    )
    replay = model.grpo.routing_replay.mode != "none"
    return Job(model, _vocabulary(config, vocab_size), batch, generation_tp, replay)


def _vocabulary(config: RunConfig, given: int | None) -> int:
    tokenizer = config.model.tokenizer
    known = config.model.override_vocab_size or given
    if known is None and tokenizer.library == "arithmetic":
        known = ARITHMETIC_VOCABULARY
    if known is None:
        raise UserError(
            f"--vocab-size: not given, allowed: the number of ids of the tokenizer in {tokenizer.type}, because "
            "model.override_vocab_size=null and no tokenizer is loaded to plan"
        )
    return known
