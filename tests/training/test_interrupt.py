"""Signals as requests, in real processes: nothing here imports torch unless the test is about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_tinylm.errors import RunStopped
from hf_tinylm.training.interrupt import DUPLICATE_SECONDS, INTERRUPT, Interrupt

Start = Callable[..., subprocess.Popen[str]]
LATER = DUPLICATE_SECONDS + 0.3  # seconds after which a signal is a second one
INSTALLED = "from hf_tinylm.training.interrupt import INTERRUPT\nimport os, signal, time\nINTERRUPT.install()\n"
READY = "print('ready', flush=True)\n"


@pytest.fixture
def start() -> Iterator[Start]:
    """Run a program in a process group of its own until it says `ready`."""
    started = []

    def run(program: str, shell: str = "exec {}", **environment: str) -> subprocess.Popen[str]:
        variables = {**os.environ, **environment}
        command = shell.format(f'"{sys.executable}" -c "$PROGRAM"')
        process = subprocess.Popen(
            ["sh", "-c", command],
            env={**variables, "PROGRAM": textwrap.dedent(program)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=20)
        return process

    yield run
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            process.wait(20)


@pytest.fixture
def borrowed() -> Iterator[Interrupt]:
    """An `Interrupt` of this process, taken down afterwards."""
    interrupt = Interrupt()
    interrupt.install()
    yield interrupt
    interrupt.uninstall()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_first_signal_outside_a_run_raises_with_the_exit_code_of_a_shell(
    borrowed: Interrupt, number: signal.Signals, code: int
) -> None:
    with pytest.raises(RunStopped, match=number.name) as caught:
        signal.raise_signal(number)
    assert caught.value.exit_code == borrowed.exit_code == code


def test_inside_a_run_a_signal_is_only_noted_and_an_immediate_repeat_is_the_same_request(borrowed: Interrupt) -> None:
    seen = []

    def run() -> None:
        with borrowed.deferred():
            seen.append(borrowed.requested)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # a launcher passes on what the terminal sent to all
            seen.append(borrowed.requested)

    with pytest.raises(RunStopped, match="SIGTERM"):  # at the end, because the block did not heed it
        run()
    assert seen == [False, True]
    assert (borrowed.name, borrowed.exit_code) == ("SIGTERM", 143)
    with pytest.raises(RunStopped, match="SIGTERM"), borrowed.deferred():
        pytest.fail("a run must not begin after a signal")


def test_a_signal_whose_exception_was_swallowed_ends_the_run_that_is_begun_next(borrowed: Interrupt) -> None:
    """Imports are full of `except Exception`."""
    try:
        signal.raise_signal(signal.SIGINT)
    except Exception:
        swallowed = True
    assert swallowed
    with pytest.raises(RunStopped, match="SIGINT"), borrowed.deferred():
        pytest.fail("a run must not begin after a signal")


def test_a_signal_during_the_way_out_raises_nothing_more(borrowed: Interrupt) -> None:
    """torchrun sends SIGTERM to the workers that are left when one has ended."""
    with pytest.raises(RunStopped), borrowed.deferred():
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert borrowed.exit_code == 130


def test_without_install_the_signals_are_taken_over_for_the_run_only() -> None:
    """So that Ctrl-C in a notebook is a KeyboardInterrupt again, and the next run may begin."""
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)

    def run() -> None:
        with interrupt.deferred():
            signal.raise_signal(signal.SIGINT)
            assert interrupt.requested

    for _ in range(2):
        with pytest.raises(RunStopped, match="SIGINT"):
            run()
        assert not interrupt.requested
        assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_installing_outside_the_main_thread_is_harmless() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        interrupt = Interrupt()
        interrupt.install()
        with interrupt.deferred():
            found.append(interrupt.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert found == [False]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("before", "blocked"),
    [
        ("", "time.sleep(60)"),
        ("import threading; lock = threading.Lock(); lock.acquire()", "lock.acquire()"),
        pytest.param("import socket; a, b = socket.socketpair()", "a.recv(1)", marks=pytest.mark.slow),
        # one call into C that does not return to Python, as a collective does not
        ("import ctypes; libc = ctypes.CDLL(None)", "while True: libc.sleep(1)"),
        pytest.param(
            "import torch; torch.set_num_threads(1); a = torch.ones(12_000, 12_000)", "a @ a", marks=pytest.mark.slow
        ),
    ],
    ids=["sleep", "lock", "recv", "ctypes", "matmul"],
)
def test_a_second_signal_ends_a_blocked_process_at_once(start: Start, before: str, blocked: str) -> None:
    process = start(f"{before}\n{INSTALLED}with INTERRUPT.deferred():\n    {READY}    {blocked}")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)  # within DUPLICATE_SECONDS: still the first request
    time.sleep(LATER)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(3) == 143
    assert time.monotonic() - began < 3
    assert process.stderr is not None
    assert "second signal" in process.stderr.read()


def test_a_second_signal_ends_a_process_whose_terminal_is_gone(start: Start) -> None:
    process = start(f"{INSTALLED}with INTERRUPT.deferred():\n    os.close(2)\n    {READY}    time.sleep(60)")
    process.send_signal(signal.SIGHUP)
    time.sleep(LATER)
    process.send_signal(signal.SIGTERM)
    assert process.wait(3) == 143


def test_a_hangup_that_nohup_ignores_stays_ignored(start: Start) -> None:
    process = start(
        f"{INSTALLED}with INTERRUPT.deferred():\n    {READY}    time.sleep(60)", shell="trap '' HUP; exec {}"
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(LATER)
    process.send_signal(signal.SIGTERM)  # the first one that counts
    time.sleep(0.2)
    assert process.poll() is None


# The parent prints its child's pid and waits; the child writes what it finds into the file FOUND.
ORPHANED = """
    import os, subprocess, sys, time
    program = "from hf_tinylm.training.interrupt import INTERRUPT\\nimport os, time\\nfrom pathlib import Path\\n"
    program += "INTERRUPT.install()\\nwith INTERRUPT.deferred():\\n"
    program += "    Path(os.environ['FOUND'] + '.ready').touch()\\n"
    program += "    until, parent = time.monotonic() + 20, os.getppid()\\n"
    program += "    while os.getppid() == parent and time.monotonic() < until: time.sleep(0.02)\\n"
    program += "    found = f'{INTERRUPT.requested} {INTERRUPT.exit_code} {INTERRUPT.name}'\\n"
    program += "    Path(os.environ['FOUND'] + '.part').write_text(found)\\n"
    program += "    os.replace(os.environ['FOUND'] + '.part', os.environ['FOUND'])\\n"
    subprocess.Popen([sys.executable, "-c", program])
    while not os.path.exists(os.environ["FOUND"] + ".ready"): time.sleep(0.02)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "True 143 The end of its launcher"),
        ({"ACCELERATE_DYNAMO_BACKEND": "NO"}, "True 143 The end of its launcher"),
        # a shell that started the run and exits is no launcher; nor is what a config or a user puts in the environment
        ({"ACCELERATE_MIXED_PRECISION": "bf16", "LOCAL_RANK": "0"}, "False 143 SIGTERM"),
    ],
    ids=["torchrun", "accelerate", "shell"],
)
def test_a_worker_notices_the_end_of_its_launcher_and_a_plain_process_outlives_its_shell(
    start: Start, tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    parent = start(ORPHANED, FOUND=str(tmp_path / "found"), **environment)
    os.kill(parent.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while not (tmp_path / "found").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (tmp_path / "found").read_text() == expected


def test_a_signal_to_a_forked_child_is_not_a_signal_to_the_run(start: Start) -> None:
    """A pool ends its workers by SIGTERM."""
    process = start(
        f"{INSTALLED}"
        """
with INTERRUPT.deferred():
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print("ready", flush=True)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
    os.kill(os.getpid(), signal.SIGINT)  # the run's first signal, not its second
    time.sleep(1.5)
    os._exit(7 if INTERRUPT.signal == signal.SIGINT else 8)
"""
    )
    assert process.wait(20) == 7


def test_the_exit_code_does_not_depend_on_whether_anybody_reads_the_output(start: Start) -> None:
    """`2>&1 | tee log` in a terminal: Ctrl-C ends tee first, and Python would turn a failed last flush into 120."""
    process = start(
        "import sys, time\nfrom hf_tinylm.errors import RunStopped, exit_with_error_line\n"
        "def command():\n"
        f"    {READY}"
        "    time.sleep(0.5)\n"
        "    print('held back in a buffer')\n"
        "    raise RunStopped('by a signal', 130)\n"
        "sys.exit(exit_with_error_line(command))",
        PYTHONUNBUFFERED="",
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(20) == 130


def test_this_process_is_left_without_handlers_of_ours() -> None:
    assert INTERRUPT.signal is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
