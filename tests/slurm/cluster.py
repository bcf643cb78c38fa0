"""A real Slurm of one node with two cores and two pretended GPUs, in a folder of its own, while the tests run."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

# cred_expire: a requeued job waits until the credential of its last start has expired, 120 seconds by default.
# KillWait: on a busy machine the step in hand takes longer than 30 seconds.
# config_overrides: the node has what is written here, whatever the machine has. Nothing needs cgroups or a database.
_SLURM_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=120
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Why no cluster can be started here; None where it can."""
    missing = [program for program in PROGRAMS if _which(program) is None]
    if missing:
        return f"needs Slurm and munge, and {', '.join(missing)} is missing: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "a cluster of its own can only be started by root"


class Cluster:
    """The commands of a running cluster."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def submit(self, *arguments: str, folder: Path, **variables: str) -> str:
        """sbatch in `folder`, with these variables in its environment; returns the job's number."""
        return self._say("sbatch", "--parsable", *arguments, folder=folder, **variables).strip()

    def requeue(self, job: str) -> None:
        """Stop the job and have it start again."""
        self._say("scontrol", "requeue", job)

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of the job; good for words without spaces."""
        words = self._say("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, condition: Callable[[dict[str, str]], object], seconds: float = 300) -> dict[str, str]:
        """Wait until the job is as `condition` wants it, and return what it then is."""
        deadline = time.monotonic() + seconds
        while not condition(shown := self.show(job)):
            assert time.monotonic() < deadline, f"still not so after {seconds:g} s: {shown}"
            time.sleep(0.2)
        return shown

    def wait_for_end(self, job: str, seconds: float = 300) -> dict[str, str]:
        """Wait until the job has ended, in whatever way."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        return self.wait(job, lambda shown: shown["JobState"] not in running, seconds)

    def _say(self, *command: str, folder: Path | None = None, **variables: str) -> str:
        environment = self.environment | variables
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose files are all in `folder`, an absolute path short enough for a socket's name."""
    host = socket.gethostname().partition(".")[0]
    ctld_port, d_port = _free_ports(2)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf, key = folder / "slurm.conf", folder / "munge.key"
    conf.write_text(_SLURM_CONF.format(host=host, folder=folder, ctld_port=ctld_port, d_port=d_port))
    for number in range(2):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu[0-1]\n")
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    # Variables of Slurm's own would speak of another cluster, or of a job that these tests run in.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
    environment |= {"SLURM_CONF": str(conf), "OMP_NUM_THREADS": "1"}
    munge_files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    daemons = (
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge_files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    )
    with contextlib.ExitStack() as stack:
        for command in daemons:
            stack.enter_context(_daemon(command, folder / f"{command[0]}.out", environment))
            if command[0] == "munged":
                _until(lambda: (folder / "munge.socket").exists(), folder)
        started = Cluster(environment)
        _until(lambda: "State=IDLE" in _output(["scontrol", "show", "node"], environment), folder)
        try:
            yield started
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False)
            with contextlib.suppress(AssertionError):
                _until(lambda: not _output(["squeue", "--noheader"], environment), folder)


@contextlib.contextmanager
def _daemon(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    with log.open("w") as output:
        program = [str(_which(command[0])), *command[1:]]
        process = subprocess.Popen(program, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _which(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


def _output(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def _until(condition: Callable[[], object], folder: Path, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.out")))
        assert time.monotonic() < deadline, f"the cluster is not ready after {seconds:g} s\n{logs}"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
