"""What a run is: `run.json`, and a readable answer to "is this the same run?"."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from .errors import ContractError
from .files import read_record, write_json

RUN_FILE = "run.json"
DONE_FILE = "DONE.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
MIRROR = "mirror.json"  # in a mirror of a run: of which
MANIFEST = "manifest.json"  # of a checkpoint, written last: sizes and SHA-256 of its files
SWEEP = "sweep"  # folder beside the run's own files; a run may start in a folder that holds it
FORMAT_VERSION = 1
_LONGEST_DIFF = 200_000  # characters
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Python, package versions, machine, and the git commit of the working folder when it is a checkout."""
    return {**packages(), "machine": f"{platform.system()} {platform.machine()}", **_git_state()}


def packages() -> dict[str, str]:
    """Versions of this package, of Python, and of the packages that decide the numbers of a run."""
    from . import __version__

    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"hf_tinylm": __version__, "python": platform.python_version(), **versions}


def new_contract(
    identity: dict[str, Any], execution: dict[str, Any], config: dict[str, Any] | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """The content of `run.json`.

    Args:
        identity: what must be equal for a resume to be the same run.
        execution: what may change between invocations.
        config: the resolved configuration that starts the run again.
        facts: anything else worth keeping, such as data sources.
    """
    return {
        "format_version": FORMAT_VERSION,
        "identity": identity,
        "execution": execution,
        "config": config,
        "facts": facts,
        "environment": environment(),
    }


def write_contract(output_dir: Path, contract: dict[str, Any]) -> None:
    """Write `run.json` atomically."""
    write_json(output_dir / RUN_FILE, contract)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders of a run by their integer step, oldest first."""
    if not output_dir.is_dir():
        return []
    return sorted((path for path in output_dir.iterdir() if path.is_dir() and is_checkpoint(path)), key=step_of)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is named as a checkpoint."""
    return _CHECKPOINT.match(folder.name) is not None


def step_of(folder: Path) -> int:
    """The update that a checkpoint folder is named after."""
    found = _CHECKPOINT.match(folder.name)
    assert found, f"{folder} is not named as a checkpoint"
    return int(found.group(1))


def check_contract(output_dir: Path, contract: dict[str, Any]) -> list[str]:
    """Compare with the recorded run; the differences in execution, which are allowed, as lines.

    Raises:
        ContractError: the folder records no run, a finished one, or one whose identity differs.
    """
    if (output_dir / DONE_FILE).is_file():
        raise ContractError(f"{output_dir} holds a finished run (DONE.json). Start a new one in another output_dir.")
    if not (output_dir / RUN_FILE).is_file():
        raise ContractError(
            f"{output_dir} has no {RUN_FILE}, so there is no run to resume. Give a new output_dir to start one."
        )
    recorded = read_record(output_dir / RUN_FILE)
    differences = difference(recorded.get("identity", {}), contract["identity"])
    if differences:
        raise ContractError(
            f"{output_dir} records another run; {'; '.join(differences)}. "
            "Use the recorded values, or another output_dir."
        )
    return difference(recorded.get("execution", {}), contract["execution"])


def beginning(identity: Any) -> dict[str, Any] | None:
    """What a run took its first weights from, as `init_from` records it; None: it began with new ones.

    A run that goes on from another one's checkpoint (`branch_from`) has that one's rows, so it began as that one did.
    """
    training = identity.get("training") if isinstance(identity, dict) else None
    if not isinstance(training, dict):
        return None
    start, branch = training.get("init_from"), training.get("branch_from")
    if start is None and isinstance(branch, dict):
        return beginning(branch.get("parent_identity"))
    return start if isinstance(start, dict) else None


def inherited_tokens(identity: Any) -> int | None:
    """Tokens that the first weights of a run had been trained on, in all the runs before it; None: not recorded."""
    start = beginning(identity)
    return 0 if start is None else start.get("inherited_tokens")


def difference(old: Any, new: Any, where: str = "") -> list[str]:
    """`["training.learning_rate: 0.0006 -> 0.001"]`: every leaf that differs, in the order of `old` then `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(old) + [key for key in new if key not in old]
        lines = []
        for key in keys:
            lines += difference(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
        return lines
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


def _git_state() -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode("utf-8", errors="replace").strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {"git_commit": None, "git_dirty": None, "git_diff": None}
    changes, status = git("diff", "HEAD"), git("status", "--porcelain")
    diff = None if not changes else changes if len(changes) <= _LONGEST_DIFF else f"{changes[:_LONGEST_DIFF]}\n[cut]"
    return {"git_commit": commit, "git_dirty": None if status is None else bool(status), "git_diff": diff}
