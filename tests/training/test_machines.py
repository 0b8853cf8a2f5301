"""Several machines, as processes that meet over the loopback interface and share only what a test lets them share.

Processes are forked from one that has imported everything; tests with real launchers are `slow`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.config import load_config
from hf_tinylm.data.prepare import prepare
from hf_tinylm.files import bundled
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.load import load_tokenizer
from hf_tinylm.training.metrics import read_rows

SLOW = pytest.mark.slow
PRETRAIN = str(bundled("recipes", "pretrain.py"))
UPDATES, SAVES = 6, 2
PATIENCE = 120.0  # seconds within which every process must have ended

# Runs the recipe: drive.py FOLDER FAULT RECIPE ARGUMENTS... Notes in FOLDER what each process reads and copies.
# FAULT, of this process or of process 1 of the launch: none; packages: others than there are; hold: wait for FOLDER/go
# when all shards are open; stop:K: touch FOLDER/held in update K and hang; kill:K: die in update K, once.
DRIVE = """
import hashlib, json, os, runpy, signal, sys, time
from pathlib import Path

folder, fault, recipe = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank, restarts = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
kind, _, at = fault.partition(":")

def note(name, value):
    with open(folder / name, "a") as file:
        file.write(json.dumps(value) + "\\n")

def before(owner, name, what):
    original = getattr(owner, name)
    def wrapped(*arguments, **keywords):
        what(*arguments, **keywords)
        return original(*arguments, **keywords)
    setattr(owner, name, wrapped)

def update_begins(trainer, batches, *_):
    number = trainer.state.global_step
    if kind == "kill" and rank == "1" and restarts == "0" and number == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop" and rank == "1" and number == int(at):
        (folder / "part").write_text(str(os.getpid()))
        os.replace(folder / "part", folder / "held")
        time.sleep(600)
    ids = b"".join(batch[name].numpy().tobytes() for batch in batches for name in ("input_ids", "shift_labels"))
    note(f"read-{rank}", [number, hashlib.sha256(ids).hexdigest()])

def run_opens(*_):
    if kind == "hold":
        (folder / f"open-{rank}").write_text(Path("/proc/self/maps").read_text())
        while not (folder / "go").exists():
            time.sleep(0.02)

from hf_tinylm.data import local_copy
from hf_tinylm.training import agreement, record, trainer
before(trainer.LMTrainer, "_attempt", update_begins)
before(record.RunRecord, "open", run_opens)
before(local_copy, "_copy", lambda source, slot, *_: note("copied", [rank, source.name, str(slot)]))
if kind == "packages":
    packages = agreement.packages
    agreement.packages = lambda: {**packages(), "torch": "2.9.1"}
sys.argv = [recipe, *sys.argv[4:]]
runpy.run_path(recipe, run_name="__main__")
"""


class Machines:
    """Starts the recipe on machines of this one, each with its own arguments."""

    def __init__(self, forks: Any, folder: Path, config: Path) -> None:
        self.forks, self.folder, self.config = forks, folder, config
        self.drive = folder / "drive.py"
        self.drive.write_text(DRIVE)
        self.out = folder / "out"

    def command(self, *more: str, fault: str = "none") -> list[str]:
        """The program and its arguments. An `--output_dir` in `more` wins."""
        recipe = [PRETRAIN, "--config", str(self.config), "--output_dir", str(self.out), "--attention_dropout", "0.1"]
        return [str(self.drive), str(self.folder), fault, *recipe, "--resume_from_checkpoint", "auto", *more]

    def start(self, *commands: Sequence[str], each: int = 1) -> list[int]:
        """Fork `each` processes of every command, which is a machine's; their pids in rank order."""
        world, pids = len(commands) * each, []
        meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        meeting |= {"LOCAL_WORLD_SIZE": str(each), "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(world):
            own = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank % each)}
            log = self.folder / f"log-{rank}"
            log.unlink(missing_ok=True)
            pids.append(self.forks.ask(arguments=list(commands[rank // each]), environment=own, output=str(log)))
        return pids

    def wait(self, pids: list[int]) -> list[int]:
        """Exit codes; a process that hangs is killed and fails the test."""
        until, codes = time.monotonic() + PATIENCE, []
        for pid in pids:
            while (code := self.forks.ask(poll=pid)) is None:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            codes.append(code)
        assert time.monotonic() < until, f"a process hung: {self.logs()}"
        return codes

    def run(self, *commands: Sequence[str], each: int = 1) -> list[int]:
        """Exit codes of all processes."""
        return self.wait(self.start(*commands, each=each))

    def logs(self) -> list[str]:
        """What each process printed."""
        return [path.read_text(errors="replace") for path in sorted(self.folder.glob("log-*"))]

    def errors(self) -> list[str]:
        """The one line with which each process ended."""
        found = []
        for log in self.logs():
            lines = [line for line in log.splitlines() if line.startswith(("error: ", "Traceback"))]
            assert len(lines) == 1, log
            found.append(lines[0].removeprefix("error: "))
        return found

    def noted(self, name: str) -> list[Any]:
        """Lines that the processes noted."""
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def machines(forks: Any, tiny_config: Path, tmp_path: Path) -> Machines:
    return Machines(forks, tmp_path, tiny_config)


@pytest.fixture(scope="module")
def whole(forks: Any, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """The undisturbed run of two processes on one machine."""
    one = Machines(forks, tmp_path_factory.mktemp("whole"), tiny_config)
    assert one.run(one.command(), each=2) == [0, 0], one.logs()
    return one


def untimed(out: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")
    return [{k: v for k, v in row.items() if k not in timed} for row in read_rows(out / "metrics.jsonl")]


def assert_same_run(found: Machines, whole: Machines) -> None:
    """Weights, moments, random states, final model and rows are equal to the bit, and every window was read once."""
    last = f"checkpoint-{UPDATES:08d}"
    names = [f"{last}/{name}.safetensors" for name in ("model", "optimizer", "rng-00000", "rng-00001")]
    for name in (*names, "final/model.safetensors"):
        first, second = load_file(whole.out / name), load_file(found.out / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    assert untimed(found.out) == untimed(whole.out)
    done = [json.loads((run.out / "DONE.json").read_text()) for run in (found, whole)]
    assert done[0]["supervised_tokens"] == done[1]["supervised_tokens"] == 6 * 256 - 51
    for rank in (0, 1):
        expected = dict(whole.noted(f"read-{rank}"))
        read = found.noted(f"read-{rank}")
        assert {number for number, _ in read} == set(expected) == set(range(UPDATES))
        assert all(expected[number] == ids for number, ids in read), f"process {rank} read other windows"


# ---- what differs between machines ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_shards(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shards of the same text, split otherwise."""
    folder = str(tmp_path_factory.mktemp("other") / "shards")
    prepare(load_config(str(tiny_config), ["--shards", folder, "--validation_fraction", "0.2"]), progress=False)
    return folder


@pytest.mark.parametrize(
    ("what", "fault", "more", "expected"),
    [
        ("shards", "none", ("--shards", "OTHER"), "data.manifest_sha256: "),
        ("no shards", "none", ("--shards", "/nowhere/shards"), "on {host} failed: /nowhere/shards"),
        ("code", "none", (), "; code: "),
        pytest.param("rate", "none", ("--learning_rate", "2e-3"), "learning_rate: '0.001' -> '0.0", marks=SLOW),
        pytest.param("schedule of saves", "none", ("--save_steps", "3"), "arguments.save_steps: ", marks=SLOW),
        pytest.param("packages", "packages", (), "packages.torch: ", marks=SLOW),
    ],
)
def test_machines_that_were_started_differently_end_together_with_one_line_and_write_nothing(
    machines: Machines, other_shards: str, what: str, fault: str, more: tuple[str, ...], expected: str
) -> None:
    second = machines.command(*(other_shards if one == "OTHER" else one for one in more), fault=fault)
    if what == "code":
        second[3] = str(machines.folder / "other.py")
        Path(second[3]).write_text(Path(PRETRAIN).read_text() + "# one line more\n")
    assert machines.run(machines.command(), second) == [2, 2], machines.logs()
    lines = machines.errors()
    host = os.uname().nodename
    assert expected.format(host=host) in lines[0]
    assert lines[0].startswith(f"Process 1 on {host} ")
    assert lines[1] == lines[0] or what == "no shards"
    assert not list(machines.out.glob("*"))


def test_weights_that_differ_between_machines_are_refused_before_the_first_update(machines: Machines) -> None:
    config = load_config(str(machines.config))
    for seed in (1, 2):
        model = new_model(config.model, 512, 32, seed=seed)
        save_stock_model(model, machines.folder / str(seed) / "model", load_tokenizer(config.tokenizer.tokenizer_path))
    commands = [machines.command("--init_from", str(machines.folder / seed / "model")) for seed in ("1", "2")]
    assert machines.run(*commands) == [2, 2], machines.logs()
    assert all("sum of weights: " in line and "init_from" in line for line in machines.errors())
    assert not machines.noted("read-0")


# ---- what machines share --------------------------------------------------------------------------------------------


@SLOW
def test_machines_with_folders_of_their_own_train_the_same_run_and_resume_it_only_from_the_same_checkpoint(
    machines: Machines, whole: Machines
) -> None:
    """Only process 0 writes; a second machine needs the run's folder, shared or copied, for a resume."""
    second = machines.folder / "second"
    start = [machines.command(), machines.command("--output_dir", str(second))]
    assert machines.run(*([*one, "--stop_after_updates", "3"] for one in start)) == [3, 3], machines.logs()
    assert not second.exists()
    before = {path: path.read_bytes() for path in machines.out.rglob("*") if path.is_file()}
    assert machines.run(*start) == [2, 2], machines.logs()
    lines = machines.errors()
    assert lines[0] == lines[1]
    assert "goes on from: 'checkpoint-00000003' -> None" in lines[0]
    assert {path: path.read_bytes() for path in machines.out.rglob("*") if path.is_file()} == before
    shutil.copytree(machines.out, second)
    copied = {path: path.read_bytes() for path in second.rglob("*") if path.is_file()}
    assert machines.run(*start) == [0, 0], machines.logs()
    assert {path: path.read_bytes() for path in second.rglob("*") if path.is_file()} == copied
    assert_same_run(machines, whole)


@SLOW
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the files that are mapped, in /proc")
def test_each_machine_copies_slow_shards_once_and_trains_from_the_copy_alone(
    machines: Machines, tiny_config: Path
) -> None:
    """Two machines of two processes: while they train, the slow folder is not even there."""
    slow = machines.folder / "slow" / "shards"
    shutil.copytree(load_config(str(tiny_config)).data.shards or "", slow)
    near = [machines.folder / f"near-{number}" for number in (0, 1)]
    commands = [machines.command("--shards", str(slow), "--stage_dir", str(one), fault="hold") for one in near]
    pids = machines.start(*commands, each=2)
    wait_for(lambda: all((machines.folder / f"open-{rank}").exists() for rank in range(4)), machines.logs)
    for rank in range(4):
        maps = (machines.folder / f"open-{rank}").read_text()
        assert str(near[rank // 2]) in maps
        assert str(slow) not in maps
    slow.rename(slow.with_name("gone"))
    (machines.folder / "go").touch()
    assert machines.wait(pids) == [0] * 4, machines.logs()
    copied = machines.noted("copied")
    assert sorted(Path(slot).parent for _, _, slot in copied) == near, "one copy for each machine"
    assert len(untimed(machines.out)) == UPDATES + 2


# ---- a machine that dies --------------------------------------------------------------------------------------------


def assert_told_of_the_loss(log: str) -> None:
    assert log.count("error: Another process of this run ended or cannot be reached any more") == 1, log
    assert "--resume_from_checkpoint auto" in log


def test_when_a_machine_dies_the_other_says_so_and_both_resume_to_the_same_bits(
    machines: Machines, whole: Machines
) -> None:
    update = random.randrange(1, UPDATES)
    assert machines.run(*[machines.command(fault=f"kill:{update}")] * 2) == [1, -9], machines.logs()
    assert_told_of_the_loss(machines.logs()[0])
    assert "Traceback" not in machines.logs()[0]
    assert len([row for row in untimed(machines.out) if "loss" in row]) == update
    assert machines.run(*[machines.command()] * 2) == [0, 0], machines.logs()
    assert_same_run(machines, whole)


def wait_for(met: Callable[[], bool], log: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < until, log()
        time.sleep(0.05)


# ---- launchers ------------------------------------------------------------------------------------------------------

TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node"]
ONE_MACHINE = [*TORCHRUN, "2", "--standalone"]
TWO_MACHINES = [*TORCHRUN, "1", "--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", "PORT", "--node_rank"]
ELASTIC = [*TORCHRUN, "1", "--nnodes", "2", "--max_restarts", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint"]
ELASTIC += ["127.0.0.1:PORT"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    str(bundled("recipes", "accelerate/multi_node.yaml")),
]
ACCELERATE += ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", "PORT"]
ACCELERATE += ["--machine_rank"]

Launch = Callable[..., list[subprocess.Popen[bytes]]]


@pytest.fixture
def launch(forks: Any) -> Iterator[Launch]:
    """Start one launcher for each machine, in sessions of their own, whose numbers follow the launcher's arguments."""
    started: list[subprocess.Popen[bytes]] = []

    def start(launcher: list[str], program: list[str], folder: Path, number: int = 2) -> list[subprocess.Popen[bytes]]:
        port = str(free_port())
        variables = {**forks.environment, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a restart reads addresses of the start before
        for rank in range(number):
            options = [one.replace("PORT", port) for one in launcher]
            options += [str(rank)] if options[-1].endswith("_rank") else []
            with (folder / f"log-{rank}").open("wb") as log:
                command = [sys.executable, *options, *program]
                process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
            started.append(process)
        return started[-number:]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def ended(processes: list[subprocess.Popen[bytes]], machines: Machines) -> list[int]:
    """Exit codes of launchers."""
    wait_for(lambda: all(process.poll() is not None for process in processes), machines.logs)
    return [process.returncode for process in processes]


@SLOW
def test_two_machines_equal_one_and_a_machine_killed_at_a_random_update_changes_nothing(
    machines: Machines, launch: Launch, forks: Any, tiny_config: Path, tmp_path: Path
) -> None:
    """torchrun on one machine, torchrun on two, then accelerate on two, of which one is killed with its launcher."""
    runs = []
    for name, launcher, number in (("one", ONE_MACHINE, 1), ("two", TWO_MACHINES, 2)):
        (tmp_path / name).mkdir()
        run = Machines(forks, tmp_path / name, tiny_config)
        assert ended(launch(launcher, run.command(), run.folder, number), run) == [0] * number, run.logs()
        runs.append(run)
    assert_same_run(runs[1], runs[0])
    update = random.randrange(1, UPDATES)
    processes = launch(ACCELERATE, machines.command(fault=f"stop:{update}"), machines.folder)
    wait_for((machines.folder / "held").exists, machines.logs)
    os.killpg(processes[1].pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # torchrun gives workers a session of their own
        os.kill(int((machines.folder / "held").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    assert ended(processes, machines) == [1, -9], machines.logs()
    assert time.monotonic() - killed < 60
    assert_told_of_the_loss(machines.logs()[0])
    assert ended(launch(ACCELERATE, machines.command(), machines.folder), machines) == [0, 0], machines.logs()
    assert_same_run(machines, runs[0])


@SLOW
def test_an_elastic_restart_goes_on_from_the_last_checkpoint_and_counts_no_token_twice(
    machines: Machines, launch: Launch, whole: Machines
) -> None:
    update = random.randrange(1, UPDATES)
    codes = ended(launch(ELASTIC, machines.command(fault=f"kill:{update}"), machines.folder), machines)
    assert codes == [0, 0], (update, machines.logs())
    assert_same_run(machines, whole)
    events = read_rows(machines.out / "events.jsonl")
    saved = update // SAVES * SAVES
    starts = [(event["event"], event["step"]) for event in events if event["event"] in ("started", "resumed")]
    assert starts == [("started", 0), ("resumed", saved) if saved else ("started", 0)]
    clocks = json.loads((machines.out / "DONE.json").read_text())["clocks"]
    assert (clocks["invocations"], clocks["thrown_away_updates"]) == (2, update - saved)
