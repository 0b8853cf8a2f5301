"""One writer at a time, an honest word on how the last one ended, and room on the right disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_tinylm import locks
from hf_tinylm.config import load_config
from hf_tinylm.errors import CheckpointError, ConfigError, ContractError
from hf_tinylm.planning import ModelShape
from hf_tinylm.training import folder as folder_module
from hf_tinylm.training import record as record_module
from hf_tinylm.training.folder import RunLock, check_disk, remove_leftovers
from hf_tinylm.training.metrics import Events, JsonLines, read_rows
from hf_tinylm.training.record import RunRecord

Make = Callable[..., Any]


def child_status(work: Callable[[], object]) -> int:
    """What `os.waitpid` says of a child that did `work`; it has 30 seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """The pid of another process that holds the run's lock, until the block ends by killing it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)
            RunLock(folder).acquire()
            os.write(writing, b"held")
            time.sleep(30)
        finally:
            os._exit(0)
    try:
        assert os.read(reading, 4) == b"held"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading), os.close(writing)


def left_by(folder: Path, host: str, seconds_ago: float, content: bytes | None = None) -> Path:
    """A lock file that nobody holds with a system lock, last touched so long ago."""
    folder.mkdir(exist_ok=True)
    path = folder / "run.lock"
    path.write_bytes(content or json.dumps({"host": host, "pid": 4242, "started": 1.0}).encode())
    then = time.time() - seconds_ago
    os.utime(path, (then, then))
    return path


# ---- the lock -------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_with_the_pid_and_host_of_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as pid, pytest.raises(ContractError) as refused:
        RunLock(tmp_path).acquire()
    assert f"{tmp_path} is being written by process {pid} on {socket.gethostname()}." in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_second_training_of_a_running_folder_is_refused_and_leaves_it_alone(
    make_trainer: Make, tmp_path: Path
) -> None:
    trainer = make_trainer(save_strategy="steps", save_steps=3)
    trainer.train()
    (trainer.output_dir / ".tmp-checkpoint-00000099-0a1b2c3d").mkdir()  # the other one is writing it
    with holder(trainer.output_dir):
        before = {path: path.read_bytes() for path in trainer.output_dir.rglob("*") if path.is_file()}
        again = make_trainer(save_strategy="steps", save_steps=3, resume_from_checkpoint="auto")
        with pytest.raises(ContractError, match="is being written by process"):
            again.train()
        assert {path: path.read_bytes() for path in trainer.output_dir.rglob("*") if path.is_file()} == before
        assert (trainer.output_dir / ".tmp-checkpoint-00000099-0a1b2c3d").is_dir()


def test_the_next_start_says_that_a_killed_one_ended_uncleanly_and_where(tmp_path: Path) -> None:
    with holder(tmp_path) as pid:
        JsonLines(tmp_path / "metrics.jsonl").append({"step": 1_234, "loss": 1.0})
        Events(tmp_path / "events.jsonl").add("saved", 1_200)
    lock = RunLock(tmp_path)
    where = f"The previous process ({pid} on {socket.gethostname()}) ended uncleanly"
    assert lock.acquire() == f"{where} after update 1,234; its last event was saved."
    lock.release()
    assert RunLock(tmp_path).acquire() is None  # released in good order


def test_a_process_killed_before_its_first_update_is_reported_as_that(tmp_path: Path) -> None:
    with holder(tmp_path):
        pass
    assert (RunLock(tmp_path).acquire() or "").endswith("ended uncleanly before its first update.")


def test_release_removes_the_lock_and_an_empty_fault_file(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    content = json.loads((tmp_path / "run.lock").read_text())
    assert (content["pid"], content["host"]) == (os.getpid(), socket.gethostname())
    with pytest.raises(ContractError):
        RunLock(tmp_path).acquire()  # not even the same process writes twice
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_start_gives_the_lock_back(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trainer(save_strategy="steps", save_steps=3).train()

    def unreadable(folder: Path) -> None:
        raise CheckpointError(f"{folder} cannot be read.")

    monkeypatch.setattr(record_module, "read_checkpoint", unreadable)
    again = make_trainer(save_strategy="steps", save_steps=3, resume_from_checkpoint="auto")
    with pytest.raises(CheckpointError):
        again.train()
    assert not (again.output_dir / "run.lock").exists()


@pytest.mark.parametrize(("seconds_ago", "held"), [(1, True), (110, True), (130, False)])
def test_another_host_holds_the_run_for_as_long_as_it_is_heard_of(
    tmp_path: Path, seconds_ago: float, held: bool
) -> None:
    left_by(tmp_path, "elsewhere", seconds_ago)
    lock = RunLock(tmp_path)
    if held:
        with pytest.raises(ContractError, match=r"4242 on elsewhere \(it spoke \d+ s ago; after 120 s of silence"):
            lock.acquire()
        assert b"elsewhere" in (tmp_path / "run.lock").read_bytes()
    else:
        assert (lock.acquire() or "").startswith("The previous process (4242 on elsewhere) ended uncleanly")
        lock.release()


def test_a_holder_is_heard_of_while_an_update_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.02)
    lock = RunLock(tmp_path)
    lock.acquire()
    os.utime(lock.path, (1.0, 1.0))
    deadline = time.monotonic() + 10
    while time.time() - lock.path.stat().st_mtime > 60:
        assert time.monotonic() < deadline, "the heartbeat stopped"
        time.sleep(0.01)
    lock.release()


@pytest.mark.parametrize("content", [b'{"host": "vm", "pi', b"\x00" * 64, b"[1, 2]", '{"host": "ä'.encode()[:-1]])
def test_a_torn_lock_is_taken_over_and_counts_as_an_unclean_end(tmp_path: Path, content: bytes) -> None:
    left_by(tmp_path, "", 1, content)
    lock = RunLock(tmp_path)
    assert lock.acquire() == "The previous process (? on ?) ended uncleanly before its first update."
    lock.release()


def test_a_lock_that_was_released_while_it_was_opened_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locked is the file that a third process finds under the name, not one that its holder has just removed."""
    real, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / "run.lock").unlink()
        calls.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    lock = RunLock(tmp_path)
    lock.acquire()
    monkeypatch.undo()
    with pytest.raises(ContractError):
        RunLock(tmp_path).acquire()
    assert len(calls) == 2
    lock.release()


@pytest.mark.parametrize(("seconds_ago", "held"), [(1, True), (130, False)])
def test_where_the_file_system_has_no_locks_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_ago: float, held: bool
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    left_by(tmp_path, socket.gethostname(), seconds_ago)
    lock = RunLock(tmp_path)
    if held:
        with pytest.raises(ContractError):
            lock.acquire()
    else:
        assert lock.acquire()
        lock.release()


# ---- crashes of the interpreter -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted"), (signal.SIGBUS, "Bus")]
)
def test_a_crash_writes_its_stack_and_the_next_start_points_to_it(
    tmp_path: Path, fault: signal.Signals, words: str
) -> None:
    def crash_in_a_kernel() -> None:
        RunLock(tmp_path).acquire()
        os.kill(os.getpid(), fault)
        time.sleep(30)

    assert os.WTERMSIG(child_status(crash_in_a_kernel)) == fault
    stack = (tmp_path / "faults.log").read_text()
    assert f"Fatal Python error: {words}" in stack
    assert "in crash_in_a_kernel" in stack
    lock = RunLock(tmp_path)
    assert f"{tmp_path / 'faults.log'} holds the stack of its crash." in (lock.acquire() or "")
    lock.release()
    assert (tmp_path / "faults.log").read_text() == stack


def test_an_old_stack_is_not_given_for_that_of_a_later_kill(tmp_path: Path) -> None:
    (tmp_path / "faults.log").write_text("Fatal Python error: of last week\n")
    os.utime(tmp_path / "faults.log", (1.0, 1.0))
    with holder(tmp_path):
        pass
    assert "stack" not in (RunLock(tmp_path).acquire() or "stack")


def test_release_works_where_stderr_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    monkeypatch.setattr("sys.__stderr__", None)
    lock.release()
    assert not lock.path.exists()


# ---- leftovers and room ---------------------------------------------------------------------------------------------


def test_a_start_removes_what_killed_writes_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".tmp-checkpoint-00000004-0a1b2c3d").mkdir()
    (tmp_path / ".tmp-checkpoint-00000004-0a1b2c3d" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-metrics.jsonl-deadbeef").write_text("half")
    for name in (".tmp-notes", ".tmp-1", "checkpoint-00000002", "thesis-0a1b2c3d"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".tmp-notes", ".tmp-1", "checkpoint-00000002", "thesis-0a1b2c3d")
    }


def volumes(monkeypatch: pytest.MonkeyPatch, small: Path, free: int) -> None:
    """Everything under `small` is on a volume with `free` bytes left; all else has room without end."""

    def disk_usage(path: Path) -> SimpleNamespace:
        inside = Path(path).resolve().is_relative_to(small.resolve())
        return SimpleNamespace(free=free if inside else 10**15)

    monkeypatch.setattr(folder_module.shutil, "disk_usage", disk_usage)


def test_the_volume_of_the_output_folder_is_asked_even_before_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    volumes(monkeypatch, tmp_path / "small", 10 * 10**9)
    monkeypatch.chdir(tmp_path)
    for output_dir in (tmp_path / "small" / "not" / "yet", Path("small/run"), tmp_path / "small"):
        with pytest.raises(ConfigError, match=r"has 10\.00 GB free and the run needs 17\.40 GB \(reason\)"):
            check_disk(output_dir, 17_400_000_000, "reason")
        check_disk(output_dir, 10 * 10**9, "exactly enough")
    check_disk(tmp_path / "large", 17_400_000_000, "reason")


def test_the_free_space_is_that_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 1000000000\.00 GB") as refused:
        check_disk(tmp_path / "run", 10**18, "all of it")
    found = float(re.search(r"has ([0-9.]+) GB free", str(refused.value)).group(1))
    facts = os.statvfs(tmp_path)
    assert found == pytest.approx(facts.f_bavail * facts.f_frsize / 1e9, abs=1.0)


def needed(output_dir: Path, name: str, export_bytes: int = 0, **training: Any) -> tuple[int, str]:
    """Bytes that a run of a bundled preset asks for."""
    config = load_config(name)
    arguments = {"save_strategy": "steps", "eval_strategy": "steps", **vars(config.training), **training}
    shape = ModelShape.from_config(config.model, config.tokenizer.vocab_size)
    trainer = SimpleNamespace(
        args=SimpleNamespace(**arguments),
        model=SimpleNamespace(config=SimpleNamespace(shape=shape)),
        plan=SimpleNamespace(updates=7_630),
        export_bytes=export_bytes,
    )
    return RunRecord.disk_needed(SimpleNamespace(trainer=trainer), output_dir)  # type: ignore[arg-type]


def test_a_run_of_100m_parameters_needs_room_for_one_checkpoint_more_than_it_keeps(tmp_path: Path) -> None:
    """100,092,672 parameters (32,000 x 768 + 12 x (2 x 768^2 + 2 x 768 x 256 + 3 x 768 x 2,048 + 2 x 768) + 768)."""
    parameters = 100_092_672
    checkpoint, final, export = 12 * parameters, 4 * parameters, 2 * parameters
    assert needed(tmp_path, "llama-100m", export, eval_strategy="no") == (
        4 * checkpoint + final + export,
        "4 checkpoints of 1.20 GB, the final model and exports",
    )
    assert needed(tmp_path, "llama-100m")[0] == 5 * checkpoint + final  # the best one by validation stays besides
    milestones = needed(tmp_path, "llama-100m", eval_strategy="no", milestone_steps=2_000)
    assert milestones[0] == (3 + 3 + 1) * checkpoint + final
    for step in (500, 1_000, 1_500):
        (tmp_path / f"checkpoint-{step:08d}").mkdir()
    assert needed(tmp_path, "llama-100m", eval_strategy="no")[0] == checkpoint + final  # three of the four are there


def test_what_a_killed_save_left_counts_as_room(tmp_path: Path) -> None:
    """It is removed before anything is written; else a disk that was just large enough would refuse the restart."""
    before = needed(tmp_path, "llama-100m")[0]
    torn = tmp_path / ".tmp-checkpoint-00000500-0a1b2c3d"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(bytes(10_000))
    assert needed(tmp_path, "llama-100m")[0] == before - 10_000


def test_a_run_without_room_is_refused_before_any_file_is_written(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    parameters = make_trainer("large", **settings).model.num_parameters()
    need = 4 * 12 * parameters + 4 * parameters
    volumes(monkeypatch, tmp_path / "run", need - 1)
    with pytest.raises(ConfigError, match="4 checkpoints of") as refused:
        make_trainer("run", **settings).train()
    assert f"{need / 1e9:.2f} GB" in str(refused.value)
    assert list((tmp_path / "run").rglob("*")) == []
    make_trainer("large", **settings).train()  # another volume
    volumes(monkeypatch, tmp_path / "run", need)
    make_trainer("run", **settings).train()
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 6
    largest = max(
        sum(path.stat().st_size for path in folder.iterdir()) for folder in (tmp_path / "run").glob("checkpoint-*")
    )
    assert largest < 12 * parameters + 40_000  # what was asked for is what a checkpoint takes, headers and RNG besides
    assert shutil.disk_usage(tmp_path / "run").free == need  # the check did look there
