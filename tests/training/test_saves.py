"""Nothing on disk is ever half true: real kills at every file operation of a save, a full disk, damaged bytes.

Each run is a child of `crash_server.py`; an order says where it is killed or refused.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.training.checkpoint import checkpoint_fault, list_checkpoints

UPDATES = 3  # of every run of the server
Order = dict[str, Any]
Server = Callable[[list[list[Order]]], list[list[int]]]
AUTO = {"resume_from_checkpoint": "auto"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crash_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
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
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


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
    timed = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds", "clocks")
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
    server: Server, whole: Path, tmp_path: Path
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
    print("a full disk:", "tmpfs" if real else "RLIMIT_FSIZE")
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
