"""Optimizer steps whose loss or gradient norm is not finite: skipped, counted, kept for a look; never for ever."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_sspo.data.responses import ResponseBatch
from nemo_sspo.errors import RunError
from nemo_sspo.training.actor import StepResult
from nemo_sspo.training.notes import note


@dataclass
class SkippedSteps:
    """Writes each offending batch to `folder`; gives up after `limit` in a row."""

    folder: Path
    limit: int

    def record(self, name: str, result: StepResult, batch: ResponseBatch, in_row: int) -> None:
        """Tell of one skipped step, the `in_row`-th without a good one in between.

        Its file, ``NAME.pt`` for ``torch.load``, has the batch (tokens, lengths, log-probabilities, advantages) and
        what the policy made of it.

        Raises:
            RunError: it is one too many. On every rank alike.
        """
        path = self.folder / f"{name}.pt"
        if dist.get_rank() == 0:
            outcome = {"policy_logprobs": result.policy_logprobs, "entropy": result.entropy}
            torch.save(vars(batch) | outcome | {"loss": result.loss, "grad_norm": result.grad_norm}, data := BytesIO())
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.getvalue())
            except OSError as error:
                note(f"{path} can't be written ({error.strerror})")
        what = f"{name} is skipped: its loss is {result.loss} and its gradient norm {result.grad_norm}"
        note(f"{what}; the weights are unchanged, the batch is in {path}")
        if in_row >= self.limit:
            raise RunError(
                f"{what}: {in_row} such steps in a row, which is trainer.grpo.max_skipped_steps; look at {path}, then "
                "lower model.optim.lr, or set trainer.precision=32, and run the same command again"
            )
