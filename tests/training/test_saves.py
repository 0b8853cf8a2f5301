"""Nothing on disk is ever half true: real kills at every file operation of a save, a full disk, damaged bytes.

Run as a program this file is a server: it imports once and forks a child for every run that a test orders, so that a
killed run costs a fraction of a second. Each child trains the same three updates.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import functools
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

UPDATES = 3
SECONDS = 60  # a child that takes longer is killed, by its own alarm
AUDITED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
real_open, real_fsync = io.open, os.fsync

Order = dict[str, Any]


# ---- the server and its children ------------------------------------------------------------------------------------


class Killer:
    """Counts the file operations of one call of a function and kills this process, for real, before number `at`.

    Operations are those that change a disk: Python's audit events of opening for writing, renaming, removing and
    making folders; every write of a Python file (of which half is done), every fsync, every safetensors file (not
    begun, and half written). With `error` that operation fails with this number instead, and the process lives on.
    """

    def __init__(self, call: int = 0, at: int | None = None, error: int | None = None) -> None:
        self.left, self.at, self.error = call, at, error
        self.thread: int | None = None  # that is in the watched call
        self.operations: list[str] = []

    @property
    def active(self) -> bool:
        return self.thread == threading.get_ident()

    def due(self) -> bool:
        return self.active and len(self.operations) == self.at

    def before(self, operation: str) -> None:
        if not self.active:
            return
        self.operations.append(operation)
        if len(self.operations) - 1 == self.at:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.error, os.strerror(self.error or 0))

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            self.thread = threading.get_ident() if self.left == 0 else self.thread
            try:
                return original(*arguments, **named)
            finally:
                self.thread = None if self.active else self.thread

        setattr(owner, name, watched)

    def install(self) -> None:
        """Intercept in this process, for good."""
        from hf_tinylm.training import checkpoint

        killer, real_save = self, checkpoint.save_file

        class HalfWritten(io.FileIO):
            def write(self, data: Any) -> int:
                if killer.due():
                    super().write(bytes(data)[: len(data) // 2])
                killer.before("write")
                return super().write(data)

        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not killer.active or not set(mode) & set("wax+"):
                return real_open(file, mode, *rest, **named)
            raw = HalfWritten(file, mode.replace("t", ""))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, named.get("encoding"), newline=named.get("newline"))

        def save_file(tensors: Any, path: Path, **named: Any) -> None:
            killer.before("tensors")
            real_save(tensors, path, **named)
            if killer.due():
                os.truncate(path, path.stat().st_size // 2)
            killer.before("half of the tensors")

        def fsync(descriptor: int) -> None:
            killer.before("fsync")
            real_fsync(descriptor)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event in AUDITED:
                killer.before(event)
            elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                killer.before("open")

        checkpoint.save_file, os.fsync, io.open, builtins.open = save_file, fsync, opened, opened
        sys.addaudithook(audit)


def build(folder: Path, fields: Order) -> Any:
    """A trainer of three updates, the last one partial, that saves after each and keeps one checkpoint."""
    from hf_tinylm.config import ModelSection
    from hf_tinylm.data.windows import TokenWindows
    from hf_tinylm.modeling.factory import new_model
    from hf_tinylm.training.arguments import LMTrainingArguments
    from hf_tinylm.training.trainer import LMTrainer

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = new_model(ModelSection(**shape, intermediate_size=32, attention_dropout=0.1), 101, 16, seed=1)
    values: Order = {
        **{"use_cpu": True, "learning_rate": 1e-3, "warmup_steps": 1, "global_batch_tokens": 64},
        **{"train_tokens": UPDATES * 64 - 21, "per_device_train_batch_size": 2, "eval_strategy": "steps"},
        **{"eval_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
        **{"save_in_background": False, "report_to": "none", "disable_tqdm": True},
    }
    ids = np.random.default_rng(0).integers(4, 101, 1_000).astype(np.uint16)
    train, validation = TokenWindows([ids], 16, "permutation", 7), TokenWindows([ids[:200]], 16, "sequential", 0)
    return LMTrainer(model, LMTrainingArguments(output_dir=str(folder), **{**values, **fields}), train, validation)


def finish(trainer: Any) -> None:
    """What the recipe does after the last update."""
    from hf_tinylm.training.finish import write_done

    final = trainer.output_dir / "final"
    trainer.save_model(str(final))
    write_done(trainer, final)


def child(order: Order) -> int:
    """One run; its exit code. The operations that were counted go to `order["operations"]`."""
    from hf_tinylm.errors import exit_with_error_line
    from hf_tinylm.training.metrics import JsonLines
    from hf_tinylm.training.record import RunRecord
    from hf_tinylm.training.saver import CheckpointSaver

    signal.alarm(SECONDS)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    killer = Killer(order.get("call", 0), order.get("at"), order.get("error"))
    phases = {"start": (RunRecord, "open"), "save": (CheckpointSaver, "_write"), "row": (JsonLines, "append")}
    phases["end"] = (sys.modules[__name__], "finish")
    if "phase" in order:
        killer.install()
        killer.watch(*phases[order["phase"]])
    if "leave" in order:
        fill_at_second_save(order["leave"], Path(order["folder"]).parent / "ballast")

    def run() -> None:
        trainer = build(Path(order["folder"]), order.get("fields", {}))
        trainer.train()
        if order["finish"]:
            finish(trainer)

    code = exit_with_error_line(run)
    if "operations" in order:
        Path(order["operations"]).write_text(json.dumps(killer.operations))
    return code


def fill_at_second_save(leave: int, ballast: Path) -> None:
    """Before the second save, leave so many bytes on the small disk; elsewhere, forbid files beyond that size."""
    import resource

    from hf_tinylm.training.saver import CheckpointSaver

    original, calls = CheckpointSaver._write, []

    def write(self: CheckpointSaver, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and os.path.ismount(ballast.parent):
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            os.truncate(ballast, ballast.stat().st_size - leave)
        elif len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (leave, resource.RLIM_INFINITY))
        original(self, *arguments)

    CheckpointSaver._write = write  # type: ignore[method-assign]


def mount_small_disk(folder: Path) -> bool:
    """Mount 4 MB of memory at `folder`, seen by this process and its children only; False where that is forbidden."""
    c = ctypes.CDLL(None, use_errno=True)
    user, mounts, private, recursive = 0x10000000, 0x00020000, 1 << 18, 1 << 14
    own = (os.getuid(), os.getgid())
    if c.unshare(mounts) != 0:
        if c.unshare(user | mounts) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {own[0]} 1")
        Path("/proc/self/gid_map").write_text(f"0 {own[1]} 1")
    if c.mount(b"none", b"/", None, private | recursive, None) != 0:
        return False
    return bool(c.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=4m") == 0)


def forked(work: Callable[[], int]) -> int:
    """Exit code of `work` in a child; -9 when it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def carry_out(chain: list[Order]) -> list[int]:
    """Exit codes of runs that follow each other in one folder."""
    return [forked(functools.partial(child, order)) for order in chain]


def carry_out_on_small_disk(chain: list[Order]) -> list[int]:
    """The same on a small disk that is freed after the first run; a last number says whether it was a real one.

    What each run left is copied to `order["copy"]`.
    """
    mounted = mount_small_disk(Path(chain[0]["folder"]).parent)
    codes = []
    for order in chain:
        codes += carry_out([order])
        shutil.copytree(order["folder"], order["copy"])
        (Path(order["folder"]).parent / "ballast").unlink(missing_ok=True)
    return [*codes, int(mounted)]


def answer(chain: list[Order]) -> list[int]:
    if "leave" not in chain[0]:
        return carry_out(chain)
    reading, writing = os.pipe()

    def isolated() -> int:  # its mount ends with this process
        os.write(writing, bytes(carry_out_on_small_disk(chain)))
        return 0

    forked(isolated)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return list(file.read())


def serve() -> None:
    """Answer each line of JSON (a list of chains of orders) with the exit codes of their children, two at a time."""
    import torch

    import hf_tinylm.training.finish  # noqa: F401 (everything that a child needs, imported once)

    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for line in sys.stdin:
            print(json.dumps(pool.map(answer, json.loads(line), chunksize=1)), flush=True)


# ---- what the tests look at -----------------------------------------------------------------------------------------

Server = Callable[[list[list[Order]]], list[list[int]]]
AUTO = {"resume_from_checkpoint": "auto"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(chains: list[list[Order]]) -> list[list[int]]:
        process.stdin.write(json.dumps(chains) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    try:
        process.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def order(folder: Path, finish: bool = False, **rest: Any) -> Order:
    return {"folder": str(folder), "log": f"{folder}.log", "finish": finish, **rest}


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert server([[order(folder, finish=True)]]) == [[0]], Path(f"{folder}.log").read_text()
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(value: Any) -> Any:
    """Without what a clock decides."""
    timed = ("seconds", "tokens_per_second", "flops_per_second", "wall_seconds", "clocks")
    if isinstance(value, list):
        return [untimed(entry) for entry in value]
    return {key: entry for key, entry in value.items() if key not in timed}


def differences(folder: Path, whole: Path, *besides: str) -> list[str]:
    """In what a run differs from the uninterrupted one, timing aside; `final` and DONE.json only where it has them.

    Args:
        besides: names that it may have more.
    """
    allowed = {"final", "DONE.json"}
    names, expected = ({path.name for path in run.iterdir()} for run in (folder, whole))
    found = [f"has {name}" for name in sorted(names - expected - set(besides))]
    found += [f"lacks {name}" for name in sorted(expected - names - allowed)]
    last = f"checkpoint-{UPDATES:08d}"
    for name in ("model", "optimizer", "rng-00000"):
        path = f"{last}/{name}.safetensors"
        if not (folder / path).is_file() or (folder / path).read_bytes() != (whole / path).read_bytes():
            found.append(f"{path} differs")
    for name in (f"{last}/trainer_state.json", *(["DONE.json"] if "DONE.json" in names else [])):
        one, two = (untimed(json.loads((run / name).read_text())) for run in (folder, whole))
        one.pop("last_checkpoint_manifest_sha256", None), two.pop("last_checkpoint_manifest_sha256", None)
        found += [] if one == two else [f"{name}: {one} instead of {two}"]
    one, two = (untimed(rows_of(run / "metrics.jsonl")) for run in (folder, whole))
    return found + ([] if one == two else [f"metrics.jsonl: {one} instead of {two}"])


def warnings_of(folder: Path) -> str:
    return "\n".join(row["reason"] for row in rows_of(folder / "events.jsonl") if row["event"] == "warned")


# ---- kills ----------------------------------------------------------------------------------------------------------

OF_A_FILE = {"os.mkdir", "open", "write", "fsync", "os.rename"}
PHASES = [
    pytest.param("start", 1, False, OF_A_FILE, id="the first start"),
    pytest.param(
        "save", 1, False, OF_A_FILE | {"tensors", "half of the tensors"}, id="the first save", marks=pytest.mark.slow
    ),
    pytest.param("save", 2, False, OF_A_FILE | {"tensors", "os.remove", "os.rmdir"}, id="a save with rotation"),
    pytest.param("row", 4, False, {"open", "write"}, id="a row of metrics"),
    pytest.param("start", 1, True, OF_A_FILE | {"os.remove"}, id="a resume", marks=pytest.mark.slow),
    pytest.param("end", 1, False, OF_A_FILE, id="the end of a run", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("phase", "call", "resumes", "kinds"), PHASES)
def test_a_run_killed_at_any_file_operation_resumes_to_the_identical_end(
    server: Server, whole: Path, tmp_path: Path, phase: str, call: int, resumes: bool, kinds: set[str]
) -> None:
    """SIGKILL before every single operation; a torn write or file for those that can be torn."""
    ended = phase == "end"
    before = [{"phase": "save", "call": 2, "at": 20}] if resumes else []
    fields = AUTO if resumes else {}

    def chain(folder: Path, last: Order) -> list[Order]:
        return [*(order(folder, **killed) for killed in before), order(folder, phase=phase, call=call, **last)]

    counted = str(tmp_path / "operations")
    codes = server([chain(tmp_path / "counted", {"operations": counted, "fields": fields, "finish": ended})])
    assert codes[0][-1] == 0
    operations = json.loads(Path(counted).read_text())
    assert set(operations) >= kinds
    folders = [tmp_path / f"killed{at}" for at in range(len(operations))]
    codes = server(
        [
            [*chain(folder, {"at": at, "fields": fields, "finish": ended}), order(folder, ended, fields=AUTO)]
            for at, folder in enumerate(folders)
        ]
    )
    for at, (folder, found) in enumerate(zip(folders, codes, strict=True)):
        where = f"before operation {at} ({operations[at]})"
        done = ended and operations[:at].count("os.rename") == operations.count("os.rename")  # DONE.json is in place
        assert found == [*([-9] * (len(before) + 1)), 2 if done else 0], f"{where}: {Path(f'{folder}.log').read_text()}"
        assert differences(folder, whole) == [], where
        if phase == "save":
            assert f"ended uncleanly after update {call}; its last event was" in warnings_of(folder), where
        if phase == "save" and call == 2:  # the first checkpoint was whole, so not a single update before it is redone
            assert rows_of(folder / "events.jsonl")[-1]["event"] != "started"
            assert "resumed" in [row["event"] for row in rows_of(folder / "events.jsonl")], where


def test_a_kill_in_a_background_write_resumes_to_the_identical_end(server: Server, whole: Path, tmp_path: Path) -> None:
    background = {"save_in_background": True}
    chains = [
        [
            order(tmp_path / str(at), phase="save", call=2, at=at, fields=background),
            order(tmp_path / str(at), fields=background | AUTO),
        ]
        for at in range(3, 40, 6)
    ]
    assert server(chains) == [[-9, 0]] * len(chains)
    for first, _ in chains:
        assert differences(Path(first["folder"]), whole) == [], first["at"]


# ---- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "call"), [pytest.param("save", 2, marks=pytest.mark.slow), ("row", 4)])
def test_no_space_at_any_operation_keeps_the_last_good_checkpoint(
    server: Server, whole: Path, tmp_path: Path, phase: str, call: int
) -> None:
    """Every operation that needs room fails once with ENOSPC: exit 1, a line that names what is left, then a resume."""
    counted = str(tmp_path / "operations")
    server([[order(tmp_path / "counted", phase=phase, call=call, operations=counted)]])
    operations = json.loads(Path(counted).read_text())
    points = [at for at, name in enumerate(operations) if name not in ("os.remove", "os.rmdir")]
    full = {"phase": phase, "call": call, "error": errno.ENOSPC}
    folders = [tmp_path / f"full{at}" for at in points]
    codes = server([[order(folder, at=at, **full)] for at, folder in zip(points, folders, strict=True)])
    for at, folder, code in zip(points, folders, codes, strict=True):
        where = f"at operation {at} ({operations[at]})"
        if code == [0] and operations[at] == "os.mkdir":
            continue  # a folder that exists already needs no room
        assert code == [1], f"{where}: {Path(f'{folder}.log').read_text()}"
        check_failed_save(folder, where)
    assert server([[order(folder, fields=AUTO)] for folder in folders if (folder / "events.jsonl").is_file()])
    for folder in folders:
        if not (folder / "final").exists():
            assert differences(folder, whole) == [], folder.name


def check_failed_save(folder: Path, where: str) -> None:
    from hf_tinylm.training.checkpoint import checkpoint_fault, list_checkpoints

    errors = [line for line in Path(f"{folder}.log").read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, where
    good = [path for path in list_checkpoints(folder) if checkpoint_fault(path) is None]
    assert good, where
    assert f"{good[-1].name} is the last good checkpoint" in errors[0], where
    assert {path.name for path in folder.iterdir()} == {
        *("metrics.jsonl", "events.jsonl", "run.json"),
        *(path.name for path in good),
    }, where


def test_a_disk_that_fills_up_in_a_save_keeps_the_last_good_checkpoint(
    server: Server, whole: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A real file system of 4 MB that is full to a few pages; where none may be mounted, a real limit of file sizes."""
    chains = []
    for pages in (0, 1, 2, 4, 6, 8, 11, 14, 17, 64):
        base = tmp_path / str(pages)
        (base / "disk").mkdir(parents=True)
        run = base / "disk" / "run"
        common = {"log": str(base / "failed.log")}
        chains.append(
            [
                order(run) | common | {"leave": 4096 * pages, "copy": str(base / "failed")},
                order(run) | common | {"fields": AUTO, "copy": str(base / "end")},
            ]
        )
    codes = server(chains)
    real = all(code[-1] for code in codes)
    record_property("full_disk", "tmpfs" if real else "RLIMIT_FSIZE")
    failed = 0
    for chain, code in zip(chains, codes, strict=True):
        base = Path(chain[0]["log"]).parent
        assert code[0] in (0, 1), (base / "failed.log").read_text()
        if code[0] == 1:
            failed += 1
            check_failed_save(base / "failed", base.name)
            assert code[1] == 0
        assert differences(base / "end", whole) == [], base.name
    assert codes[-1][0] == 0  # there was room
    assert failed >= (6 if real else 2)


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its third save, with the checkpoints of updates 1 and 2."""
    folder = tmp_path_factory.mktemp("two") / "run"
    assert server([[order(folder, phase="save", call=3, at=0, fields={"save_total_limit": 2})]]) == [[-9]]
    return folder


def damaged(folder: Path, step: int, name: str, how: str) -> None:
    path = folder / f"checkpoint-{step:08d}" / name
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 3] ^= 1
    path.write_bytes(content[: len(content) // 2] if how == "cut" else content)


FILES = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "rng-00000.safetensors"]
FILES += ["trainer_state.json"]


def test_a_damaged_file_is_named_and_the_older_checkpoint_leads_to_the_identical_end(
    server: Server, whole: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    chains = []
    for name in FILES:
        for how in ("flipped", "cut"):
            folder = tmp_path / f"{name}-{how}"
            shutil.copytree(two_checkpoints, folder)
            damaged(folder, 2, name, how)
            named = {"resume_from_checkpoint": str(folder / "checkpoint-00000002")}
            chains.append([order(folder, fields=named), order(folder, fields=AUTO)])
    assert server(chains) == [[1, 0]] * len(chains)
    for chain in chains:
        folder = Path(chain[0]["folder"])
        name = folder.name.rsplit("-", 1)[0]
        log = Path(chain[0]["log"]).read_text()
        refused = next(line for line in log.splitlines() if line.startswith("error: "))
        assert "checkpoint-00000002 cannot be resumed from" in refused
        assert name.split(".")[0] in refused
        passed_over = next(line for line in warnings_of(folder).splitlines() if "passed over" in line)
        assert passed_over.startswith("checkpoint-00000002 was passed over")
        assert name.split(".")[0] in passed_over
        assert differences(folder, whole, "set-aside-checkpoint-00000002") == [], folder.name


def test_any_byte_of_a_manifest_that_changes_is_found(two_checkpoints: Path, tmp_path: Path) -> None:
    from hf_tinylm.training.checkpoint import checkpoint_fault

    folder = tmp_path / "checkpoint-00000002"
    shutil.copytree(two_checkpoints / folder.name, folder)
    content = (folder / "manifest.json").read_bytes()
    assert checkpoint_fault(folder) is None
    for position in range(len(content) - 1):  # the last one is the line break at the end
        changed = bytearray(content)
        changed[position] ^= 1
        (folder / "manifest.json").write_bytes(changed)
        assert checkpoint_fault(folder) is not None, (position, chr(content[position]))


def test_with_every_checkpoint_damaged_the_run_starts_over_and_says_so(
    server: Server, whole: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    damaged(folder, 1, "model.safetensors", "flipped")
    damaged(folder, 2, "manifest.json", "cut")
    assert server([[order(folder, fields=AUTO)]]) == [[0]]
    assert differences(folder, whole, *(f"set-aside-checkpoint-0000000{step}" for step in (1, 2))) == []
    assert warnings_of(folder).count("was passed over") == 2


def test_a_damaged_newest_checkpoint_does_not_count_when_old_ones_are_removed(
    server: Server, whole: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    """One is kept: were the damaged one of update 9 the newest, each save would remove itself and all good ones."""
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    (folder / "checkpoint-00000002").rename(folder / "checkpoint-00000009")
    assert server([[order(folder, fields=AUTO, phase="save", call=2, at=0), order(folder, fields=AUTO)]]) == [[-9, 0]]
    assert "checkpoint-00000009 was passed over: its manifest.json is of update 2" in warnings_of(folder)
    assert [row["step"] for row in rows_of(folder / "events.jsonl") if row["event"] == "resumed"] == [1, 2]
    assert (folder / "set-aside-checkpoint-00000009" / "model.safetensors").is_file()
    assert differences(folder, whole, "set-aside-checkpoint-00000009") == []


def test_who_goes_back_to_an_older_checkpoint_and_is_killed_does_not_leap_over_the_dropped_rows(
    server: Server, whole: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    back = {"resume_from_checkpoint": str(folder / "checkpoint-00000001")}
    killed = order(folder, fields=back, phase="row", call=4, at=0)
    assert server([[killed, order(folder, fields=AUTO)]]) == [[-9, 0]]
    assert (folder / "set-aside-checkpoint-00000002" / "model.safetensors").is_file()
    assert differences(folder, whole, "set-aside-checkpoint-00000002") == []


if __name__ == "__main__":
    serve()
