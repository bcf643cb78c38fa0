"""Write generated problems as JSONL: ``python -m nemo_sspo.data FOLDER --task addition --min-digits 2 ...``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nemo_sspo.config.schema import SyntheticDataConfig
from nemo_sspo.data.arithmetic import TASKS, generate_problems
from nemo_sspo.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Write FOLDER/train.jsonl, validation.jsonl and test.jsonl, with worked responses; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_sspo.data",
        description="Write generated arithmetic problems as train.jsonl, validation.jsonl and test.jsonl.",
        epilog="example: python -m nemo_sspo.data my_data --task subtraction --min-digits 1 --max-digits 3 --seed 7",
    )
    parser.add_argument("folder", type=Path, help="where to write; made if it does not exist")
    parser.add_argument("--task", default="addition", help=f"one of {', '.join(TASKS)} (default: addition)")
    for name, default in (("min-digits", 2), ("max-digits", 2), ("train", 400), ("validation", 64), ("test", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--seed", type=int, default=1234, help="default: 1234")
    options = parser.parse_args(arguments)
    config = SyntheticDataConfig(
        task=options.task,
        min_digits=options.min_digits,
        max_digits=options.max_digits,
        num_train=options.train,
        num_validation=options.validation,
        num_test=options.test,
    )
    try:
        splits = generate_problems(config, options.seed)
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, problems in zip(("train", "validation", "test"), splits, strict=True):
            lines = [json.dumps({"question": p.question, "answer": p.answer, "response": p.response}) for p in problems]
            (options.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {options.folder} can't be written ({error.strerror})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
