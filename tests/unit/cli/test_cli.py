"""The command line as a user meets it: help, one-line errors with status 2, nothing written, quick answers."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nemo_sspo import __version__, cli

COMMANDS = ["train", "eval", "report", "gates"]


@pytest.fixture
def shell(tmp_path: Path, repository: Path):
    """Run the command in an empty folder, as torchrun would with `rank` set."""

    def run(*arguments: str, program: str = "-m nemo_sspo", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *program.split(), *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(repository)} | env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch):
    """Put functions in place of a module that a command would import; returns what they were called with."""

    def install(module: str, result: object, *names: str) -> list[tuple]:
        calls: list[tuple] = []

        def record(*arguments: object) -> object:
            calls.append(arguments)
            if isinstance(result, Exception):
                raise result
            return result

        fake = types.ModuleType(module)
        for name in names:
            setattr(fake, name, record)
        monkeypatch.setitem(sys.modules, module, fake)
        return calls

    return install


class TestHelp:
    def test_top_level_lists_the_commands(self, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main(["-h"])
        assert caught.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        for command in COMMANDS:
            assert any(line.split()[:1] == [command] and len(line.split()) > 3 for line in lines)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_shows_an_example(self, command, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
        examples = capsys.readouterr().out.partition("examples:\n")[2]
        assert examples.startswith(f"  nemo-sspo {command} ")

    def test_no_command_shows_help_with_status_2(self, capsys):
        assert cli.main([]) == 2
        assert "train" in capsys.readouterr().out

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"nemo-sspo {__version__}\n"


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["trian"], "invalid choice: 'trian'"),
            (["train"], "the following arguments are required: --config-name; see nemo-sspo train --help"),
            (["train", "--config-name", "tiny_moe_cpu", "--seed=2"], "unrecognized arguments: --seed=2"),
            (["train", "--config-name", "nope"], "no config named 'nope'"),
            (["train", "--config-name", "tiny_moe_cpu", "model.sed=2"], "did you mean model.seed?"),
            (["train", "--config-name", "tiny_moe_cpu", "trainer.grpo.samples_per_prompt=1"], "allowed: >= 2"),
            (["eval"], "the following arguments are required: --run"),
            (["eval", "--run", "nope"], "not a run's folder"),
            (["eval", "--run", "nope", "--split", "train"], "invalid choice: 'train'"),
            (["eval", "--run", "nope", "--samples", "x"], "invalid int value: 'x'"),
            (["eval", "--run", "nope", "extra"], "unrecognized arguments: extra; see nemo-sspo eval --help"),
            (["report"], "the following arguments are required: DIR"),
            (["report", "nope"], "nope: no such folder"),
            (["gates", "--gate", "atanlgo"], "--gate: unknown 'atanlgo'; allowed: "),
            (["gates", "--gate", "atanlgo"], "Did you mean 'atanlog'?"),
            (["gates", "--preset", "paper"], "--preset: unknown 'paper'; allowed: paper_literal, paper_scale."),
            (["gates", "--tau-pos", "0", "--tau-neg", "1"], "--tau-pos: got 0, allowed: a finite number above 0"),
            (["gates", "--tau-pos", "1", "--tau-neg", "-2"], "--tau-neg: got -2, allowed"),
            (["gates", "--tau-pos", "nan", "--tau-neg", "1"], "--tau-pos: got nan, allowed"),
            (["gates", "--tau-pos", "1"], "--tau-pos, --tau-neg: got one of the two"),
            (["gates", "--tau-pos", "1", "--tau-neg", "1", "--preset", "paper_scale"], "--preset: names a pair"),
            (["gates", "--tau-pos", "x"], "invalid float value: 'x'"),
            (["gates", "--output", "/dev/null/gates"], "--output: /dev/null/gates cannot be written (Not a directory)"),
        ],
    )
    def test_one_line_and_status_2(self, arguments, message, capsys, tmp_path, monkeypatch, stub):
        stub("nemo_sspo.training.run", AssertionError("training began"), "run_training")
        monkeypatch.chdir(tmp_path)
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("nemo-sspo: error: ")
        assert captured.err.count("\n") == 1
        assert message in captured.err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("world_size", ["zero", "0", "-1", ""])
    def test_bad_world_size(self, world_size, capsys, monkeypatch, stub):
        stub("nemo_sspo.training.run", AssertionError("training began"), "run_training")
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert cli.main(["train", "--config-name", "tiny_moe_cpu"]) == 2
        assert "WORLD_SIZE: got " in capsys.readouterr().err

    def test_only_rank_0_speaks(self, capsys, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        assert cli.main(["train", "--config-name", "nope"]) == 2
        assert capsys.readouterr().err == ""


class TestDispatch:
    def test_train_takes_overrides_before_and_after_options(self, stub):
        calls = stub("nemo_sspo.training.run", 75, "run_training")
        assert cli.main(["train", "model.seed=2", "--config-name", "tiny_moe_cpu", "trainer.devices=4"]) == 75
        ((config,),) = calls
        assert (config.model.seed, config.trainer.devices) == (2, 4)

    def test_train_validates_for_the_processes_that_torchrun_started(self, stub, capsys, monkeypatch):
        calls = stub("nemo_sspo.training.run", 0, "run_training")
        monkeypatch.setenv("WORLD_SIZE", "3")
        assert cli.main(["train", "--config-name", "tiny_moe_cpu", "model.micro_batch_size=8"]) == 2
        assert "the 3 data-parallel ranks (3 processes)" in capsys.readouterr().err
        assert calls == []

    def test_input_error_of_the_run_is_one_line(self, stub, capsys):
        from nemo_sspo.errors import UserError

        stub("nemo_sspo.training.run", UserError("a.jsonl:3: not JSON\nsecond line"), "run_training")
        assert cli.main(["train", "--config-name", "tiny_moe_cpu"]) == 2
        assert capsys.readouterr().err == "nemo-sspo: error: a.jsonl:3: not JSON second line\n"

    def test_other_errors_keep_their_traceback(self, stub):
        stub("nemo_sspo.training.run", RuntimeError("loss is nan"), "run_training")
        with pytest.raises(RuntimeError, match="loss is nan"):
            cli.main(["train", "--config-name", "tiny_moe_cpu"])

    def test_eval(self, stub, tmp_path, tiny_run):
        calls = stub("nemo_sspo.training.evaluate", 0, "run_evaluation")
        assert cli.main(["eval", "--run", str(tiny_run)]) == 0
        arguments = ["--checkpoint", "step_000100", "--split", "validation", "--samples", "8"]
        assert cli.main(["eval", "--run", str(tiny_run), *arguments]) == 0
        assert calls == [(tiny_run, None, "test", 0), (tiny_run, "step_000100", "validation", 8)]

    def test_eval_refuses_negative_samples(self, tiny_run, capsys):
        assert cli.main(["eval", "--run", str(tiny_run), "--samples", "-1"]) == 2
        assert "--samples: got -1, allowed: >= 0" in capsys.readouterr().err

    def test_report_of_one_run(self, stub, tmp_path, capsys):
        (tmp_path / "report.html").write_text("one")
        calls = stub("nemo_sspo.report", tmp_path / "report.html", "write_report", "write_comparison")
        assert cli.main(["report", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
        assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "copy.html")]) == 0
        assert (tmp_path / "copy.html").read_text() == "one"
        assert calls == [(tmp_path,), (tmp_path,)]

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_report_that_cannot_be_written_is_named(self, stub, tmp_path, capsys, count):
        folders = [tmp_path / name for name in "ab"[:count]]
        for folder in folders:
            folder.mkdir()
        (tmp_path / "file").write_text("")
        stub("nemo_sspo.report", tmp_path / "x.html", "write_report", "write_comparison")
        output = str(tmp_path / "file" / "out.html")
        assert cli.main(["report", *map(str, folders), "--output", output]) == 2
        assert capsys.readouterr().err.startswith("nemo-sspo: error: --output: cannot write ")

    def test_an_interrupt_is_one_line_and_resumable(self, monkeypatch, capsys):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "_parser", interrupt)
        assert cli.main(["train"]) == 75
        assert capsys.readouterr().err.count("\n") == 1

    def test_report_of_several_runs(self, stub, tmp_path):
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir()
        calls = stub("nemo_sspo.report", tmp_path / "x.html", "write_report", "write_comparison")
        assert cli.main(["report", *map(str, folders)]) == 0
        assert cli.main(["report", *map(str, folders), "--output", "x.html"]) == 0
        assert calls == [(folders, Path("comparison.html")), (folders, Path("x.html"))]

    def test_gates(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["gates", "--gate", "siglog", "gumbel", "--tau-pos", "1", "--tau-neg", "2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2:] == ["results/gates/gates.png", "results/gates/gates.svg"]
        assert "  given: 1 where A > 0, 2 elsewhere" in lines
        assert [line.split()[:2] for line in lines[4:8]] == [
            ["siglog", "1"], ["siglog", "2"], ["gumbel", "-"], ["GMPO", "clip,"],
        ]  # fmt: skip
        assert (tmp_path / lines[-2]).is_file() and (tmp_path / lines[-1]).is_file()


@pytest.fixture
def tiny_run(tmp_path: Path) -> Path:
    from nemo_sspo.config import load_config, to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(load_config("tiny_moe_cpu")))
    return tmp_path


class TestProcess:
    """The same through a real process: `python -m nemo_sspo` and the example script."""

    def test_help_imports_no_torch(self, shell):
        result = shell("-X", "importtime", "-m", "nemo_sspo", "train", "--help", program="")
        assert result.returncode == 0
        assert "nemo_sspo.cli" in result.stderr
        assert "torch" not in result.stderr

    def test_a_misspelt_key_imports_no_torch_and_writes_nothing(self, shell, tmp_path):
        arguments = ["train", "--config-name", "tiny_moe_cpu", "model.sed=2"]
        result = shell("-X", "importtime", "-m", "nemo_sspo", *arguments, program="")
        assert result.returncode == 2
        assert "| torch\n" not in result.stderr
        assert "did you mean model.seed?" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_one_line_without_traceback(self, shell, tmp_path):
        result = shell("train", "--config-name", "tiny_moe_cpu", "model.micro_batch_size=5")
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith("nemo-sspo: error: model.micro_batch_size: got 5, ")
        assert result.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []

    def test_other_ranks_are_silent(self, shell):
        result = shell("train", "--config-name", "nope", RANK="1", WORLD_SIZE="2")
        assert (result.returncode, result.stdout, result.stderr) == (2, "", "")

    def test_the_example_is_the_same_command(self, shell, repository):
        result = shell("--config-name", "nope", program=str(repository / "examples" / "train_sspo.py"))
        assert result.returncode == 2
        assert result.stderr.startswith("nemo-sspo: error: --config-name: no config named 'nope'")
