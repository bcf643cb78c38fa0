"""What a run leaves behind: JSON Lines flushed line by line, and TensorBoard in step with them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nemo_sspo.errors import UserError
from nemo_sspo.report.jsonl import dump_line, plain, read_lines, write_json, write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = Mapping[str, Any]

COLD_START, METRICS, VALIDATION, SAMPLES = "cold_start.jsonl", "metrics.jsonl", "validation.jsonl", "samples.jsonl"


class RunRecorder:
    """Writes a run's folder. Only rank 0 has one.

    Tensors, arrays and their scalars are converted; NaN and infinities become ``null`` and have no point in
    TensorBoard. There the supervised stage has its own run, ``cold_start``: a resumed run purges its events by step,
    and both stages count from 1.

    Record everything of a rollout, its validation included, before its checkpoint is saved: `resume` keeps what
    belongs to the rollouts up to the checkpoint's.

    Args:
        run_dir: the run's folder; made if it does not exist.
        tensorboard: also write TensorBoard events.

    Raises:
        UserError: the folder cannot be made or written to.
    """

    def __init__(self, run_dir: str | os.PathLike[str], tensorboard: bool = True) -> None:
        self.run_dir = Path(run_dir)
        self._tensorboard = tensorboard
        self._files: dict[str, IO[str]] = {}
        self._writers: dict[str, SummaryWriter] = {}
        self._purge_step: dict[str, int] = {}
        _check_writable(self.run_dir)
        self._validated = _validated(self.run_dir)

    def start(self, config: str, environment: Record) -> None:
        """Write ``config.yaml`` (the resolved configuration as YAML) and ``environment.json``."""
        write_text(self.run_dir / "config.yaml", config)
        write_json(self.run_dir / "environment.json", environment)

    def cold_start(self, record: Record) -> None:
        """Add one optimizer step of the supervised stage; `record` has ``step``, from 1."""
        self._append(COLD_START, record)
        self._scalars("cold_start", "", record)

    def metrics(self, record: Record) -> None:
        """Add one optimizer step of GRPO; `record` has ``step`` and ``rollout``, both from 1."""
        self._append(METRICS, record)
        self._scalars("", "", record)

    def validation(self, record: Record) -> None:
        """Add one validation; `record` has ``rollout`` (0: before GRPO), ``step`` and ``split``.

        A second record for the same rollout and split is left out: a resumed run may validate at its
        checkpoint again.
        """
        key = (record["rollout"], record["split"])
        if key in self._validated:
            return
        self._validated.add(key)
        self._append(VALIDATION, record)
        self._scalars("", f"{record['split']}/", record)

    def samples(self, records: Iterable[Record]) -> None:
        """Add some responses of a rollout; each has ``rollout``."""
        for record in records:
            self._append(SAMPLES, record)

    def summary(self, record: Record) -> None:
        """Write ``summary.json``, atomically."""
        write_json(self.run_dir / "summary.json", record)

    def resume(self, rollout: int, step: int, cold_start_step: int) -> None:
        """Forget what was recorded after a checkpoint, so that the resumed run's files read as if it had never stopped.

        Each file is rewritten atomically; a half-written last line goes too. ``resume(0, 0, 0)`` starts over.

        Args:
            rollout: GRPO steps that the checkpoint has behind it.
            step: optimizer steps of GRPO that it has behind it.
            cold_start_step: optimizer steps of the supervised stage that it has behind it.

        Raises:
            UserError: a line in the middle of a file is no JSON object.
        """
        self.close()
        dropped = self._keep(COLD_START, lambda record: record["step"] <= cold_start_step)
        # A checkpoint from within the cold start lies before the validation that is numbered 0.
        first = 0 if rollout > 0 or (cold_start_step > 0 and not dropped) else 1
        dropped += self._keep(METRICS, lambda record: record["step"] <= step)
        dropped += self._keep(VALIDATION, lambda record: first <= record["rollout"] <= rollout)
        dropped += self._keep(SAMPLES, lambda record: record["rollout"] <= rollout)
        if dropped:  # a summary speaks of a run's end, which now lies ahead again
            (self.run_dir / "summary.json").unlink(missing_ok=True)
        self._purge_step = {"": step + 1 - first, "cold_start": cold_start_step + 1}
        self._validated = _validated(self.run_dir)

    def close(self) -> None:
        """Close the files; the next record opens them again."""
        for closable in (*self._files.values(), *self._writers.values()):
            closable.close()
        self._files.clear()
        self._writers.clear()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, name: str, record: Record) -> None:
        if name not in self._files:
            self._keep(name, lambda _: True)  # a half line from a killed run must not swallow this one
            self._files[name] = open(self.run_dir / name, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        self._files[name].write(dump_line(record))
        self._files[name].flush()

    def _keep(self, name: str, wanted: Callable[[Record], bool]) -> int:
        """Rewrite a file with the wanted lines only; returns how many whole lines it lost."""
        path = self.run_dir / name
        lines = read_lines(path)
        kept = "".join(line for line, record in lines if wanted(record))
        if path.exists() and path.stat().st_size != len(kept.encode()):
            write_text(path, kept)
        return len(lines) - kept.count("\n")

    def _scalars(self, run: str, prefix: str, record: Record) -> None:
        if not self._tensorboard:
            return
        if run not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            purge_step = self._purge_step.pop(run, None)
            self._writers[run] = SummaryWriter(str(self.run_dir / run), purge_step=purge_step)
        writer = self._writers[run]
        for key, value in plain(record).items():
            if key != "step" and isinstance(value, int | float):
                writer.add_scalar(prefix + key, value, record["step"])
        writer.flush()


def _validated(run_dir: Path) -> set[tuple[int, str]]:
    return {(record["rollout"], record["split"]) for _, record in read_lines(run_dir / VALIDATION)}


def _check_writable(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(
            f"exp_manager.explicit_log_dir: cannot write to {str(run_dir)!r} ({error.strerror or error}); "
            "give a folder that can be made and written to"
        ) from None
