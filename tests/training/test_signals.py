"""Signals to real runs of the recipe, in every phase, and what a resume makes of them.

A run is held in the phase that a test is about: it touches a file there and waits for another. A server process imports
torch once and forks the runs; launchers start theirs the long way and are `slow`.

What launchers do, as asserted here: torchrun and `accelerate launch --multi_gpu` pass SIGINT and SIGTERM on, wait for
TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (30 unless set, too short for a large model's update and save), kill what is
left, and report 1. `accelerate launch` of one process passes nothing on: SIGTERM ends it alone (-15), and its worker
notices that it is an orphan. The exit codes 130 and 143 are the workers' own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.files import bundled
from hf_tinylm.training.interrupt import DUPLICATE_SECONDS
from hf_tinylm.training.metrics import read_rows

PRETRAIN = str(bundled("recipes", "pretrain.py"))
UPDATES = 6
SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM

# Runs the recipe: drive.py FOLDER PHASE RECIPE ARGUMENTS... In PHASE it touches FOLDER/held-RANK and awaits FOLDER/go.
DRIVE = """
import os, runpy, signal, sys, time
from pathlib import Path

folder, phase, recipe = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank, seen = os.environ.get("RANK", "0"), {"update": 0, "forward": 0, "batch": 0}

def hold(where):
    held = folder / f"held-{rank}"
    if where != phase or held.exists():
        return
    held.with_suffix(".part").write_text(str(os.getpid()))
    os.replace(held.with_suffix(".part"), held)
    until = time.monotonic() + 60
    while not (folder / "go").exists():
        if time.monotonic() > until:
            os._exit(99)
        time.sleep(0.01)

def before(owner, name, what):
    original = getattr(owner, name)
    def wrapped(*arguments, **keywords):
        what(*arguments, **keywords)
        return original(*arguments, **keywords)
    setattr(owner, name, wrapped)

def update_begins(*_, **__):
    seen["update"] += 1
    seen["forward"] = 0

def forward(model, *_, **__):
    seen["forward"] += model.training
    if model.training and seen["update"] == 5 and seen["forward"] == 2:  # neither evaluated nor saved
        hold("accumulation")
        if phase == "stopping":
            os.kill(os.getpid(), signal.SIGTERM)

def evaluate_batch(*_):
    seen["batch"] += 1
    if seen["batch"] == 3:
        hold("evaluation")

def count(*_):
    if seen["update"] == 6:
        hold("last update")

def train_ends(*_):
    hold("export")

if phase != "none":
    from hf_tinylm.data import pack
    from hf_tinylm.modeling import model
    from hf_tinylm.training import record, saver, trainer, update, validation
    before(pack, "open_pack", lambda *_, **__: hold("start-up"))
    before(record.RunRecord, "open", lambda *_: hold("preparation"))
    before(update.Update, "run", update_begins)
    before(model.TinyLMForCausalLM, "forward", forward)
    before(validation, "_batch_sums", evaluate_batch)
    saves = {2: "save", 5: "stopping", 6: "last save"}
    before(saver, "write_checkpoint", lambda _, snapshot: hold(saves.get(snapshot.step)))
    before(trainer.LMTrainer, "_count", count)
    before(trainer.LMTrainer, "save_model", train_ends)
sys.argv = [recipe, *sys.argv[4:]]
runpy.run_path(recipe, run_name="__main__")
"""


class Server:
    """Starts runs of the recipe from a process that has imported everything."""

    def __init__(self, forks: Any, folder: Path, config: Path) -> None:
        self.folder, self.config = folder, config
        self.ask, self.environment = forks.ask, forks.environment
        self.drive = folder / "drive.py"
        self.drive.write_text(DRIVE)

    def arguments(self, run: Path, phase: str, *more: str) -> list[str]:
        """Of a driver whose run is `run`/out and which is held in `phase`."""
        run.mkdir(parents=True, exist_ok=True)
        recipe = [PRETRAIN, "--config", str(self.config), "--output_dir", str(run / "out")]
        dropout = ["--attention_dropout", "0.1", "--resume_from_checkpoint", "auto"]
        return [str(self.drive), str(run), phase, *recipe, *dropout, *more]


class Run:
    """One or more processes of a run."""

    def __init__(
        self, server: Server, folder: Path, phase: str, *more: str, processes: int = 1, output: Path | None = None
    ) -> None:
        self.server, self.folder = server, folder
        arguments = server.arguments(folder, phase, *more)
        self.pids = []
        port = free_port() if processes > 1 else 0
        for rank in range(processes):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            environment |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.pids.append(
                server.ask(
                    arguments=arguments,
                    environment=environment if processes > 1 else {},
                    output=str(output or folder / f"log-{rank}"),
                )
            )

    def held(self, ranks: int = 1) -> None:
        wait_for_files(*(self.folder / f"held-{rank}" for rank in range(ranks)), log=self.log)

    def release(self) -> None:
        (self.folder / "go").touch()

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def codes(self, timeout: float = 40) -> list[int]:
        """Exit codes of all processes; those that do not end in time are killed."""
        until, codes = time.monotonic() + timeout, []
        for pid in self.pids:
            while (code := self.server.ask(poll=pid)) is None:
                if time.monotonic() > until:
                    os.killpg(pid, signal.SIGKILL)
                time.sleep(0.02)
            codes.append(code)
        return codes

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("log-*")))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_files(*paths: Path, log: Callable[[], str] = str, timeout: float = 60) -> None:
    until = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"{[path.name for path in paths]} did not appear: {log()}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(forks: Any, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(forks, tmp_path_factory.mktemp("server"), tiny_config)


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The output folder of the uninterrupted run of so many processes."""
    folders: dict[int, Path] = {}

    def of(processes: int) -> Path:
        if processes not in folders:
            folder = tmp_path_factory.mktemp("whole")
            run = Run(server, folder, "none", processes=processes)
            assert run.codes() == [0] * processes, run.log()
            folders[processes] = folder / "out"
        return folders[processes]

    return of


def events_of(out: Path) -> list[dict[str, Any]]:
    return read_rows(out / "events.jsonl")


def untimed(out: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")
    return [{k: v for k, v in row.items() if k not in timed} for row in read_rows(out / "metrics.jsonl")]


def saved_steps(out: Path) -> list[int]:
    """Steps of the checkpoints that are there, each with a manifest."""
    return sorted(int(path.parent.name.removeprefix("checkpoint-")) for path in out.glob("checkpoint-*/manifest.json"))


def assert_stopped_at(out: Path, step: int, reason: str) -> None:
    """The complete update `step` is the last one recorded and saved, and nothing says that the run is done."""
    last = events_of(out)[-1]
    assert (last["event"], last["step"], last["reason"]) == ("interrupted", step, reason)
    assert saved_steps(out)[-1] == step
    assert [row["step"] for row in untimed(out) if "loss" in row] == list(range(1, step + 1))
    assert not (out / "DONE.json").exists()
    assert not list(out.glob(".tmp-*"))


def assert_resumes_to(server: Server, folder: Path, whole: Path, processes: int = 1, *more: str) -> None:
    """A resume ends in the bits of the uninterrupted run: weights, moments, random states, rows, final model."""
    run = Run(server, folder, "none", *more, processes=processes)
    assert run.codes() == [0] * processes, run.log()
    out = folder / "out"
    last = f"checkpoint-{UPDATES:08d}"
    names = [f"{last}/model.safetensors", f"{last}/optimizer.safetensors", "final/model.safetensors"]
    for name in [*names, *(f"{last}/rng-{rank:05d}.safetensors" for rank in range(processes))]:
        first, second = load_file(whole / name), load_file(out / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    assert untimed(out) == untimed(whole)
    assert (out / "DONE.json").is_file()


# ---- one process ----------------------------------------------------------------------------------------------------

# phase, signal, update that is saved (None: no run has begun), arguments
PHASES = [
    ("start-up", SIGTERM, None, ()),
    pytest.param("preparation", SIGINT, 1, (), marks=pytest.mark.slow),
    ("accumulation", SIGINT, 5, ()),
    pytest.param("evaluation", SIGTERM, 3, (), marks=pytest.mark.slow),
    pytest.param("save", SIGTERM, 3, ("--save_in_background", "false"), marks=pytest.mark.slow),  # of update 2
    pytest.param("last update", SIGINT, 6, (), marks=pytest.mark.slow),  # before its evaluation
    ("last save", SIGTERM, 6, ()),
]


@pytest.mark.parametrize(("phase", "number", "step", "more"), PHASES)
def test_a_signal_in_any_phase_saves_a_complete_update_and_the_run_resumes_to_the_same_bits(
    server: Server, whole: Callable[[int], Path], tmp_path: Path, phase: str, number: int, step: int | None, more: Any
) -> None:
    run = Run(server, tmp_path, phase, *more)
    run.held()
    run.send(number)
    run.release()
    assert run.codes() == [128 + number], run.log()
    out = tmp_path / "out"
    if step is None:
        assert not out.exists()
    else:
        assert_stopped_at(out, step, signal.Signals(number).name)
        evaluated = [row["step"] for row in untimed(out) if "eval_loss" in row]
        expected = {"accumulation": [3], "last update": [3], "last save": [3, 6]}.get(phase, [])
        assert evaluated == expected, "an evaluation that was cut short leaves no row"
    assert "Traceback" not in run.log()
    assert run.log().count("stopped: ") == 1
    assert_resumes_to(server, tmp_path, whole(1))


@pytest.mark.slow
def test_a_signal_while_the_model_is_exported_ends_at_once_and_the_resume_completes_the_run(
    server: Server, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    run = Run(server, tmp_path, "export")
    run.held()
    run.send(SIGTERM)  # not released: nothing is waited for
    assert run.codes() == [143], run.log()
    assert saved_steps(tmp_path / "out")[-1] == UPDATES
    assert not (tmp_path / "out" / "DONE.json").exists()
    assert_resumes_to(server, tmp_path, whole(1))


@pytest.mark.slow
def test_a_signal_while_a_background_save_is_slow_waits_for_it(
    server: Server, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    run = Run(server, tmp_path, "save")
    run.held()
    run.send(SIGTERM)
    time.sleep(1.5)
    assert server.ask(poll=run.pids[0]) is None, "the checkpoint is still being written"
    run.release()
    assert run.codes() == [143], run.log()
    step = events_of(tmp_path / "out")[-1]["step"]
    assert step in (3, 4)  # training goes on until the next save has to wait
    assert_stopped_at(tmp_path / "out", step, "SIGTERM")
    assert_resumes_to(server, tmp_path, whole(1))


def test_an_evaluation_that_is_cut_short_twice_still_has_its_row_in_the_end(
    server: Server, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    for attempt in range(2):
        run = Run(server, tmp_path, "evaluation")
        run.held()
        run.send(SIGTERM)
        run.release()
        assert run.codes() == [143], run.log()
        assert_stopped_at(tmp_path / "out", 3, "SIGTERM")
        (tmp_path / "held-0").unlink()
        (tmp_path / "go").unlink()
        starts = [event["event"] for event in events_of(tmp_path / "out") if event["event"] in ("started", "resumed")]
        assert len(starts) == attempt + 1
    assert_resumes_to(server, tmp_path, whole(1))
    state = json.loads((tmp_path / "out" / "checkpoint-00000003" / "trainer_state.json").read_text())
    assert not state["evaluation_due"]
    assert state["eval_loss"] == next(row["eval_loss"] for row in untimed(tmp_path / "out") if "eval_loss" in row)


@pytest.mark.slow
def test_a_second_signal_ends_the_run_within_seconds_and_it_resumes_from_the_save_before(
    server: Server, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    run = Run(server, tmp_path, "accumulation")
    run.held()
    run.send(SIGINT)
    time.sleep(DUPLICATE_SECONDS + 0.3)
    assert server.ask(poll=run.pids[0]) is None
    began = time.monotonic()
    run.send(SIGINT)
    assert run.codes() == [130]
    assert time.monotonic() - began < 3
    assert saved_steps(tmp_path / "out") == [2, 4]
    assert_resumes_to(server, tmp_path, whole(1))


def test_a_run_whose_output_nobody_reads_any_more_still_saves(server: Server, tmp_path: Path) -> None:
    """Ctrl-C at `pretrain.py 2>&1 | tee log` ends tee as well."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = Run(server, tmp_path, "accumulation", output=pipe)
    run.held()
    os.close(reading)
    run.send(SIGINT)
    run.release()
    assert run.codes() == [130]
    assert_stopped_at(tmp_path / "out", 5, "SIGINT")


@pytest.mark.slow
def test_a_budget_ends_the_recipe_with_exit_code_3_and_the_run_resumes_to_the_same_bits(
    server: Server, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    priced = ["--price_per_hour", "3600"]
    for step, budget in enumerate((["--max_hours", "1e-6"], ["--max_cost", "1e-6"], ["--stop_after_updates", "1"]), 1):
        run = Run(server, tmp_path, "none", *budget, *priced)
        assert run.codes() == [3], run.log()
        assert_stopped_at(tmp_path / "out", step, f"{budget[0][2:]}={float(budget[1]):g}")
        assert f"stopped: {budget[0][2:]}=" in run.log()
    assert_resumes_to(server, tmp_path, whole(1), 1, *priced)
    clocks = json.loads((tmp_path / "out" / "DONE.json").read_text())["clocks"]
    assert (clocks["invocations"], clocks["thrown_away_updates"]) == (4, 0)
    assert clocks["cost"] == pytest.approx(clocks["wall_seconds"], abs=0.01)
    assert clocks["cost"] > sum(clocks["seconds"][name] for name in ("training", "start-up")) > 0


@pytest.mark.slow
def test_a_maximal_cost_without_a_price_is_bad_usage(server: Server, tmp_path: Path) -> None:
    run = Run(server, tmp_path, "none", "--max_cost", "3")
    assert run.codes() == [2]
    assert "needs a price" in run.log()


# ---- two processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "number", "ranks", "step"),
    [
        ("accumulation", SIGTERM, (0, 1), 5),
        pytest.param("accumulation", SIGINT, (1,), 5, marks=pytest.mark.slow),  # one of them only
        pytest.param("preparation", SIGTERM, (1,), 1, marks=pytest.mark.slow),
        pytest.param("evaluation", SIGINT, (0, 1), 3, marks=pytest.mark.slow),
        pytest.param("evaluation", SIGTERM, (1,), 3, marks=pytest.mark.slow),
        pytest.param("last update", SIGTERM, (1,), 6, marks=pytest.mark.slow),
        pytest.param("export", SIGTERM, (0, 1), None, marks=pytest.mark.slow),
    ],
)
def test_processes_stop_together_at_the_same_update_with_the_same_code(
    server: Server, whole: Callable[[int], Path], tmp_path: Path, phase: str, number: int, ranks: Any, step: int | None
) -> None:
    run = Run(server, tmp_path, phase, processes=2)
    run.held(2)
    run.send(number, *ranks)
    run.release()
    assert run.codes() == [128 + number] * 2, run.log()
    if step is not None:
        assert_stopped_at(tmp_path / "out", step, signal.Signals(number).name)
    assert "Traceback" not in run.log()
    assert_resumes_to(server, tmp_path, whole(2), 2)


@pytest.mark.slow
def test_no_process_leaves_before_the_checkpoint_is_written(
    server: Server, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    """A launcher would end the one that is still writing."""
    run = Run(server, tmp_path, "stopping", processes=2)  # each sends itself the signal; the last write is held
    run.held()
    time.sleep(2)
    assert "stopped: " not in run.log(), "a process is on its way out"
    run.release()
    assert run.codes() == [143, 143], run.log()
    assert_resumes_to(server, tmp_path, whole(2), 2)


@pytest.mark.slow
def test_a_second_signal_ends_processes_that_wait_for_each_other(server: Server, tmp_path: Path) -> None:
    run = Run(server, tmp_path, "save", "--save_in_background", "false", processes=2)  # only the main one is held
    run.held()
    run.send(SIGTERM)
    time.sleep(DUPLICATE_SECONDS + 0.5)
    began = time.monotonic()
    run.send(SIGTERM)
    assert run.codes() == [143, 143]
    assert time.monotonic() - began < 3
    assert saved_steps(tmp_path / "out") == []


@pytest.mark.slow
def test_a_budget_of_one_process_ends_both(server: Server, whole: Callable[[int], Path], tmp_path: Path) -> None:
    for step, budget in enumerate((["--max_hours", "1e-6"], ["--stop_after_updates", "1"]), 1):
        run = Run(server, tmp_path, "none", *budget, processes=2)
        assert run.codes() == [3, 3], run.log()
        assert saved_steps(tmp_path / "out")[-1] == step
    assert_resumes_to(server, tmp_path, whole(2), 2)


# ---- launchers ------------------------------------------------------------------------------------------------------

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--quiet", "--num_machines", "1", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no"]
ACCELERATE_ONE = [*ACCELERATE, "--num_processes", "1"]
ACCELERATE_TWO = [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


@pytest.fixture
def launch(server: Server, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a launcher in a session of its own, as a terminal would, with its run held in a phase."""
    started: list[subprocess.Popen[bytes]] = []

    def start(launcher: list[str], phase: str) -> subprocess.Popen[bytes]:
        variables = {**server.environment, "ACCELERATE_USE_CPU": "true", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
        log = (tmp_path / "log-launcher").open("wb")
        command = [sys.executable, *launcher, *server.arguments(tmp_path, phase)]
        started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True))
        return started[-1]

    yield start
    pids = [int(held.read_text()) for held in tmp_path.glob("held-?")]
    for pid in [process.pid for process in started] + pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for process in started:
        process.wait(20)


def wait_until_ended(pids: list[int], timeout: float) -> None:
    """For processes that are not this one's children."""
    until = time.monotonic() + timeout
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in pids):
        assert time.monotonic() < until, "a worker is still running"
        time.sleep(0.05)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="watches processes in /proc")
@pytest.mark.parametrize(
    ("launcher", "target", "number", "code", "reason"),
    [
        (TORCHRUN, "launcher", SIGTERM, 1, "SIGTERM"),
        (TORCHRUN, "group", SIGINT, 1, "SIGINT"),
        (TORCHRUN, "worker", SIGTERM, 1, "SIGTERM"),
        (TORCHRUN, "launcher", signal.SIGKILL, -9, "The end of its launcher"),
        (ACCELERATE_TWO, "group", SIGTERM, 1, "SIGTERM"),
        (ACCELERATE_ONE, "launcher", SIGTERM, -15, "The end of its launcher"),
        (ACCELERATE_ONE, "group", SIGINT, -2, "SIGINT"),
        (ACCELERATE_ONE, "worker", SIGTERM, 1, "SIGTERM"),
        (ACCELERATE_ONE, "launcher", signal.SIGKILL, -9, "The end of its launcher"),
    ],
)
def test_under_a_launcher_the_workers_save_the_update_they_are_in(
    server: Server,
    whole: Callable[[int], Path],
    launch: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    launcher: list[str],
    target: str,
    number: int,
    code: int,
    reason: str,
) -> None:
    processes = 1 if launcher is ACCELERATE_ONE else 2
    process = launch(launcher, "accumulation")
    held = [tmp_path / f"held-{rank}" for rank in range(processes)]
    wait_for_files(*held, log=lambda: (tmp_path / "log-launcher").read_text())
    workers = [int(path.read_text()) for path in held]
    if target == "group":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if target == "launcher" else workers[-1], number)
    time.sleep(0.5)  # the launcher passes it on, or is gone
    (tmp_path / "go").touch()
    found = process.wait(60)
    wait_until_ended(workers, 30)
    log = (tmp_path / "log-launcher").read_text()
    assert found == code, log
    assert_stopped_at(tmp_path / "out", 5, reason)
    assert "Go on with --resume_from_checkpoint auto" in log
    assert_resumes_to(server, tmp_path, whole(processes), processes)
