"""What the wheel carries, and that the tools' settings do what they say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCES = ["nemo_sspo", "conf", "pyproject.toml", "README.md", "LICENSE"]


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A copy of what a build needs, so that nothing is written into the checkout."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCES:
        source = repository / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.mark.slow
def test_the_wheel_trains_by_config_name_from_anywhere(checkout, tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path / "dist", checkout]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("nemo_sspo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert "nemo_sspo/conf_installed/tiny_moe_cpu.yaml" in names
    assert {name.split("/")[0] for name in names} == {"nemo_sspo", wheel.name.rsplit("-", 3)[0] + ".dist-info"}

    code = "from nemo_sspo.config import load_config; print(load_config('tiny_moe_cpu').model.hidden_size)"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "96\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("objective/gates.py", "import nemo_sspo.config", "Layers"),
        ("objective/gates.py", "import megatron.core", "The objective is torch alone"),
        ("data/__init__.py", "import nemo_sspo.compat", "Patches of foreign libraries"),
        ("training/trainer.py", "import nemo_aligner", "Only nemo_sspo.aligner imports NeMo"),
    ],
)
def test_import_contracts_notice_an_arrow_that_points_up(checkout, module, line, contract):
    def lint() -> subprocess.CompletedProcess[str]:
        tool = Path(sys.executable).with_name("lint-imports")
        return subprocess.run([tool, "--no-cache"], cwd=checkout, capture_output=True, text=True, check=False)

    before = lint()
    assert before.returncode == 0, before.stdout
    path = checkout / "nemo_sspo" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    after = lint()
    assert after.returncode == 1
    broken = after.stdout.partition("Broken contracts")[2]
    assert contract in broken
