"""A run's folder, read back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_sspo.errors import UserError
from nemo_sspo.report.jsonl import read_lines

Records = list[dict[str, Any]]

_REQUIRED = {
    "cold_start": ("step",),
    "metrics": ("step", "rollout"),
    "validation": ("rollout", "split", "pass_at_1"),
    "samples": ("rollout", "prompt", "response"),
}


@dataclass(frozen=True)
class Outcome:
    """Greedy pass@1 before GRPO and at the latest validation of the same split."""

    split: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    @property
    def lift(self) -> float | None:
        """Absolute rise of pass@1; None while one of the two is missing."""
        first, last = (self.before or {}).get("pass_at_1"), (self.after or {}).get("pass_at_1")
        return None if first is None or last is None else last - first


@dataclass(frozen=True)
class RunData:
    """What a run has recorded so far. Whatever it has not come to is empty."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    cold_start: Records = field(default_factory=list)
    metrics: Records = field(default_factory=list)
    validation: Records = field(default_factory=list)
    samples: Records = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    def option(self, dotted: str, default: Any = None) -> Any:
        """A value of config.yaml by its dotted key."""
        node: Any = self.config
        for key in dotted.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    def column(self, table: str, key: str, split: str | None = None) -> np.ndarray:
        """One key over the records of a table, float64; NaN where a record lacks it or has null.

        Args:
            table: ``cold_start``, ``metrics`` or ``validation``.
            key: a key of that file's lines.
            split: only validation records of this split.
        """
        records = [record for record in getattr(self, table) if split is None or record["split"] == split]
        try:
            return np.array([np.nan if (x := record.get(key)) is None else float(x) for record in records], dtype=float)
        except (TypeError, ValueError):
            raise UserError(f"{self.folder / table}.jsonl: {key!r} must be a number or null on every line") from None

    def by_rollout(self, key: str, combine: Callable[[Any, Any], Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The rollouts in order, and `key` at the last optimizer step on each, or combined over all of its steps.

        A rollout's own numbers, such as its reward, are on all of its steps.
        """
        values: dict[int, float] = {}
        for record, value in zip(self.metrics, self.column("metrics", key), strict=True):
            rollout = record["rollout"]
            values[rollout] = combine(values[rollout], value) if combine and rollout in values else value
        return np.array(list(values), dtype=float), np.array(list(values.values()), dtype=float)

    def has(self, table: str, key: str) -> bool:
        """Whether any record of the table has a value for the key."""
        return any(record.get(key) is not None for record in getattr(self, table))

    @property
    def outcome(self) -> Outcome:
        """Pass@1 before and after, on the test split once it has both, else on validation."""
        outcomes = []
        for split in ("test", "validation"):
            records = sorted((r for r in self.validation if r["split"] == split), key=lambda r: r["rollout"])
            before = next((record for record in records if record["rollout"] == 0), None)
            after = records[-1] if records and records[-1]["rollout"] > 0 else None
            outcomes.append(Outcome(split, before, after))
        complete = [outcome for outcome in outcomes if outcome.lift is not None]
        begun = [outcome for outcome in outcomes if outcome.before or outcome.after]
        return (complete or begun or outcomes)[0]


def load_run(folder: str | os.PathLike[str]) -> RunData:
    """Read a run's folder; the run may be finished, in progress or killed.

    Raises:
        UserError: no such folder, no config.yaml in it, or a file with a line that is not what the run writes.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a run (exp_manager.explicit_log_dir)")
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder}: not a run's folder, config.yaml is missing; give a run's exp_manager.explicit_log_dir"
        )
    return RunData(
        folder=folder.resolve(),
        config=_load_mapping(folder / "config.yaml"),
        environment=_load_mapping(folder / "environment.json"),
        summary=_load_mapping(folder / "summary.json"),
        **{table: _load_table(folder / f"{table}.jsonl", keys) for table, keys in _REQUIRED.items()},
    )


def _load_table(path: Path, required: Sequence[str]) -> Records:
    records = []
    for number, (_, record) in enumerate(read_lines(path), start=1):
        missing = [key for key in required if key not in record]
        if missing:
            raise UserError(
                f"{path}: record {number} lacks {', '.join(map(repr, missing))}; delete the line or the file"
            )
        records.append(record)
    return records


def _load_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); restore or delete it") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: got {type(value).__name__}, expected keys with values; restore or delete it")
    return value
