"""A server for tests of crashes: it imports once and forks a child for every run that a test orders.

So a run that is killed costs a fraction of a second. Each child trains the same three updates. `test_saves.py` starts
this program and writes orders to its standard input.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

UPDATES = 3
SECONDS = 60  # a child that takes longer is killed, by its own alarm
AUDITED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
real_open, real_fsync = io.open, os.fsync

Order = dict[str, Any]


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
    from hf_tinylm.data.windows import TokenWindows
    from hf_tinylm.modeling.factory import new_model
    from hf_tinylm.sections import ModelSection
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
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(leave, 4096), resource.RLIM_INFINITY))  # room for the log
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


if __name__ == "__main__":
    serve()
