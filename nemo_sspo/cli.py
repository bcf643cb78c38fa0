"""The command line: ``nemo-sspo train | eval | convert | plan | report | gates``.

Arguments and config are checked before torch is imported, so that ``--help`` and a misspelt key answer at once.
Exit status: 0 done, 1 failed (with a traceback), 2 wrong usage or input (one line), 75 stopped on a signal and
resumable.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nemo_sspo import __version__
from nemo_sspo.errors import UserError

_TRAIN_EXAMPLES = """\
examples:
  nemo-sspo train --config-name tiny_moe_cpu
  nemo-sspo train --config-name tiny_moe_cpu model.seed=2 exp_manager.explicit_log_dir=results/seed_2
  nemo-sspo train --config-name tiny_moe_cpu model.data.data_prefix.train=[problems.jsonl]
  torchrun --nproc-per-node 2 -m nemo_sspo train --config-name tiny_moe_cpu
  nemo-sspo train --config-name qwen3_30b_a3b_sspo --dry-run

The same command again resumes the run in exp_manager.explicit_log_dir from its newest checkpoint.
"""

_EVAL_EXAMPLES = """\
examples:
  nemo-sspo eval --run results/tiny_moe_cpu
  nemo-sspo eval --run results/tiny_moe_cpu --checkpoint step_000100 --split validation --samples 8
"""

_CONVERT_EXAMPLES = """\
examples:
  nemo-sspo convert hf-to-megatron Qwen3-30B-A3B qwen3_megatron
  nemo-sspo convert megatron-to-hf results/tiny_moe_cpu exported
  torchrun --nproc-per-node 8 -m nemo_sspo convert hf-to-megatron Qwen3-30B-A3B qwen3_megatron \\
      model.expert_model_parallel_size=8

pretrained_checkpoint.restore_from_path takes either kind of folder. An export that was killed goes on when repeated.
"""

_REPORT_EXAMPLES = """\
examples:
  nemo-sspo report results/tiny_moe_cpu
  nemo-sspo report results/sspo results/grpo --output comparison.html
"""

_GATES_EXAMPLES = """\
examples:
  nemo-sspo gates --output docs/images
  nemo-sspo gates --preset paper_literal
  nemo-sspo gates --gate atanlog expsig --tau-pos 2 --tau-neg 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``argv`` defaults to the process's arguments."""
    try:
        parser = _parser()
        arguments, extra = parser.parse_known_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 2
        if arguments.command in ("train", "convert", "plan"):  # argparse leaves overrides that follow an option over
            arguments.overrides += [text for text in extra if not text.startswith("-")]
            extra = [text for text in extra if text.startswith("-")]
        if extra:
            raise UserError(f"unrecognized arguments: {' '.join(extra)}; see nemo-sspo {arguments.command} --help")
        return arguments.handler(arguments)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"nemo-sspo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:  # before training starts, or the second one within it
        print(
            "nemo-sspo: interrupted; to go on from the newest checkpoint, run the same command again", file=sys.stderr
        )
        return 75


def _train(arguments: argparse.Namespace) -> int:
    from nemo_sspo.config import load_config, validate

    if arguments.dry_run:
        config = load_config(arguments.config_name, arguments.overrides, arguments.config_dir, read_pretrained=None)
        size = _world_size() if "WORLD_SIZE" in os.environ else config.trainer.num_nodes * config.trainer.devices
        validate(config, size)
        from nemo_sspo.plan.dry_run import describe

        print(describe(config, size))
        return 0
    config = load_config(arguments.config_name, arguments.overrides, arguments.config_dir)
    validate(config, _world_size())
    from nemo_sspo.training.run import run_training

    return run_training(config)


def _eval(arguments: argparse.Namespace) -> int:
    from nemo_sspo.config import load_run_config

    load_run_config(arguments.run)  # refuses a folder that is not a run's before torch is imported
    if arguments.samples < 0:
        raise UserError(f"--samples: got {arguments.samples}, allowed: >= 0; 0 leaves the sampled answers out")
    from nemo_sspo.training.evaluate import run_evaluation

    return run_evaluation(arguments.run, arguments.checkpoint, arguments.split, arguments.samples)


def _convert(arguments: argparse.Namespace) -> int:
    if not arguments.source.is_dir():
        raise UserError(f"SRC: {arguments.source} is not a folder; see nemo-sspo convert {arguments.direction} --help")
    from nemo_sspo.training import convert

    run = convert.hf_to_megatron if arguments.direction == "hf-to-megatron" else convert.megatron_to_hf
    return run(arguments.source, arguments.target, arguments.overrides)


def _report(arguments: argparse.Namespace) -> int:
    from nemo_sspo.report import write_comparison, write_report

    output = arguments.output
    try:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
        if len(arguments.runs) > 1:
            written = write_comparison(arguments.runs, output or Path("comparison.html"))
        else:
            written = write_report(arguments.runs[0])
            if output is not None and output.resolve() != written.resolve():
                written = Path(shutil.copyfile(written, output))
    except OSError as error:
        place = error.filename2 or error.filename or output
        raise UserError(f"--output: cannot write {place} ({error.strerror}); give a file that can be written") from None
    print(written)
    return 0


def _gates(arguments: argparse.Namespace) -> int:
    given = {"--tau-pos": arguments.tau_pos, "--tau-neg": arguments.tau_neg}
    for option, tau in given.items():
        if tau is not None and not 0 < tau < math.inf:
            raise UserError(f"{option}: got {tau:g}, allowed: a finite number above 0")
    temperatures = [tau for tau in given.values() if tau is not None]
    if len(temperatures) == 1:
        raise UserError("--tau-pos, --tau-neg: got one of the two; give both or neither")
    if temperatures and arguments.preset is not None:
        raise UserError("--preset: names a pair of temperatures; leave it or --tau-pos and --tau-neg out")
    from nemo_sspo.report.gates_figure import temperature_sets, write_gates

    sets = temperature_sets(tuple(temperatures), arguments.preset)
    table, *written = write_gates(arguments.output, sets, arguments.gate)
    print(table, *written, sep="\n")
    return 0


class _Parser(argparse.ArgumentParser):
    """Wrong usage is a `UserError`: one line, status 2, printed by one process only."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nemo-sspo",
        description="Soft Sequence Policy Optimization for mixture-of-experts language models.",
        epilog="nemo-sspo COMMAND --help shows a command's options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nemo-sspo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    train = _command(commands, "train", "train a model; resumes the run it finds", _TRAIN_EXAMPLES)
    train.add_argument("--config-name", required=True, metavar="NAME", help="a config's file name without .yaml")
    train.add_argument("--config-dir", type=Path, metavar="DIR", help="searched before ./conf and the package's conf")
    train.add_argument(
        "--dry-run", action="store_true", help="check the config, print the layout and what it needs, and stop"
    )
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config overrides in Hydra's syntax")
    train.set_defaults(handler=_train)

    evaluate = _command(commands, "eval", "measure a finished or stopped run's accuracy", _EVAL_EXAMPLES)
    evaluate.add_argument("--run", type=Path, required=True, metavar="DIR", help="a run's folder")
    evaluate.add_argument("--checkpoint", metavar="STEP", help="such as step_000100 (default: the newest)")
    evaluate.add_argument("--split", choices=("test", "validation"), default="test", help="default: test")
    evaluate.add_argument(
        "--samples",
        type=int,
        default=0,
        metavar="N",
        help="also answer every problem N times at the run's temperature (default: 0)",
    )
    evaluate.set_defaults(handler=_eval)

    convert = _command(commands, "convert", "convert weights from and to Hugging Face folders", _CONVERT_EXAMPLES)
    convert.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf"))
    convert.add_argument("source", type=Path, metavar="SRC", help="a Hugging Face folder; or a run, a checkpoint in it")
    convert.add_argument("target", type=Path, metavar="DST", help="a folder that does not hold a model yet")
    convert.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="layout keys, for several processes")
    convert.set_defaults(handler=_convert)

    from nemo_sspo.plan import command as plan_command

    plan = _command(commands, "plan", "list the layouts that fit a number of GPUs, best first", plan_command.EXAMPLES)
    plan_command.add_arguments(plan)
    plan.set_defaults(handler=plan_command.run)

    report = _command(commands, "report", "write a run's report.html, or compare several runs", _REPORT_EXAMPLES)
    report.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="a run's folder")
    report.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: DIR/report.html for one run, comparison.html for several",
    )
    report.set_defaults(handler=_report)

    gates = _command(commands, "gates", "draw the gates and check the conditions on them", _GATES_EXAMPLES)
    gates.add_argument(
        "--output",
        type=Path,
        default=Path("results/gates"),
        metavar="DIR",
        help="where gates.png and gates.svg go (default: results/gates)",
    )
    gates.add_argument("--gate", nargs="+", action="extend", metavar="NAME", help="default: every gate")
    gates.add_argument("--tau-pos", type=float, metavar="X", help="temperature where the advantage is above 0")
    gates.add_argument("--tau-neg", type=float, metavar="Y", help="temperature elsewhere; larger decays faster")
    gates.add_argument("--preset", metavar="NAME", help="paper_literal or paper_scale, instead of --tau-*")
    gates.set_defaults(handler=_gates)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"WORLD_SIZE: got {text!r}, allowed: a whole number >= 1; torchrun sets it")
    return int(text)
