"""Runs the functions ``check_*`` of a folder in a pytest of their own, with other packages in front of everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_checks(repository: Path, folder: Path, in_front: Path, limit: float) -> None:
    """Fails with that pytest's output if a check fails, is skipped, or none is found."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(in_front)}
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", "-o", "python_functions=check_*"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    done = subprocess.run(command, env=environment, cwd=repository, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
