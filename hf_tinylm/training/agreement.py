"""Processes of one run agree, or end together: no process waits for one that failed or that was started differently.

Processes on several machines have nothing in common but what their launcher told them. Here they compare what they were
started with, and tell each other their failures, before any of them changes or writes anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..contract import difference, packages
from ..errors import DisagreementError, RunStopped, TinyLMError, TrainingError
from .optimizer import optimizer_tensors

if TYPE_CHECKING:
    from .trainer import LMTrainer

# Where this machine keeps its files, and what only the main process does with them.
_OF_ONE_MACHINE = (
    *("output_dir", "stage_dir", "mirror_dir", "init_from", "branch_from", "resume_from_checkpoint", "logging_dir"),
    *("local_rank", "run_name", "report_to", "disable_tqdm", "project", "note", "expect", "hub_token"),
)
_DIFFERENCES = 4  # that an error names
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree_on_start(trainer: LMTrainer) -> None:
    """Compare what the processes were started with: packages, our code, arguments, model, data. Also a barrier.

    Raises:
        DisagreementError: a process has others than the main one, or failed on its way here; raised on all processes.
        TrainingError: a process is gone.
    """
    if _several():
        _exchange(
            {"facts": _start_facts(trainer)}, "Give all machines the same packages, code, configuration and data."
        )


def agree_on_checkpoint(folder: Path | None) -> None:
    """Compare which checkpoint each process found to go on from, None for a new run; raises as `agree_on_start`."""
    if _several():
        facts = {"goes on from": None if folder is None else folder.name}
        advice = "Only process 0 writes a run: give all machines its output_dir, shared or copied with the checkpoint."
        _exchange({"facts": facts}, advice)


def agree_on_state(trainer: LMTrainer) -> None:
    """Compare weights and moments before the first update, as later only gradients travel; raises as above."""
    if _several():
        facts = {
            "updates done": trainer.state.global_step,
            "tokens": trainer.supervised_tokens,
            "sum of weights": sum_of_bits(trainer.model.state_dict()),
            "sum of moments": sum_of_bits(optimizer_tensors(trainer.optimizer, trainer.model)),
        }
        _exchange({"facts": facts}, "init_from and the checkpoint must be the same files on all machines.")


def all_are_here() -> None:
    """A barrier that also hears of failures; raises as above."""
    if _several():
        _exchange({})


@contextlib.contextmanager
def failure_told() -> Iterator[None]:
    """Tell a failure in this block to the processes that wait in the next comparison, and let it go on here."""
    try:
        yield
    except (DisagreementError, RunStopped):
        raise  # all of them have it; a signal waits for nobody
    except (TinyLMError, OSError) as error:
        if _several():
            with contextlib.suppress(TinyLMError):  # which is this failure, in the words for the others
                _exchange({"failure": " ".join(str(error).split())})
        raise


@contextlib.contextmanager
def loss_told() -> Iterator[None]:
    """Turn what a collective raises when a process or its machine is gone into one line.

    Raises:
        TrainingError: in place of that error.
    """
    try:
        yield
    except RuntimeError as error:
        if not _several() or not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        reason = re.sub(r"^\[[^]]*] *", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
        raise TrainingError(
            f"Another process of this run ended or cannot be reached any more ({reason}). Its own output, on its own "
            "machine, says why. Start all of them again with --resume_from_checkpoint auto."
        ) from error


def code_sha256() -> str:
    """Hash of the Python files of this package and of the program that runs; 12 hexadecimal digits."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None and Path(program).is_file():
        digest.update(Path(program).read_bytes())
    return digest.hexdigest()[:12]


def sum_of_bits(tensors: dict[str, torch.Tensor]) -> int:
    """The sum of all elements, read as integers: tells other contents apart, and is the same in any order."""
    total = 0
    for tensor in tensors.values():
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        total += int(bits.sum(dtype=torch.int64))
    return total


def _start_facts(trainer: LMTrainer) -> dict[str, Any]:
    arguments = {
        field.name: str(getattr(trainer.args, field.name))
        for field in dataclasses.fields(trainer.args)
        if field.init and field.name not in _OF_ONE_MACHINE
    }
    return {
        "packages": packages(),
        "loss kernel": trainer.loss_kernel.name,
        "code": code_sha256(),
        "arguments": arguments,
        "model": trainer.model.config.identity,
        "windows": [len(data) if data is not None else None for data in (trainer.train_dataset, trainer.eval_dataset)],
        "data": trainer.run_facts,
    }


def _several() -> bool:
    """Whether this process is one of several that have met."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _exchange(own: dict[str, Any], advice: str = "") -> None:
    """Send and receive; every process comes to the same verdict.

    Raises:
        DisagreementError: some process failed or has other facts.
    """
    own = {"host": platform.node(), "facts": None, "failure": None, **own}
    said: list[Any] = [None] * torch.distributed.get_world_size()
    with loss_told():
        torch.distributed.all_gather_object(said, own)
    for rank, process in enumerate(said):
        if process["failure"]:
            raise DisagreementError(f"Process {rank} on {process['host']} failed: {process['failure']}")
    for rank, process in enumerate(said):
        lines = difference(said[0]["facts"], process["facts"])
        if lines:
            more = f" and {len(lines) - _DIFFERENCES} more" if len(lines) > _DIFFERENCES else ""
            raise DisagreementError(
                f"Process {rank} on {process['host']} differs from process 0 on {said[0]['host']}; "
                f"{'; '.join(lines[:_DIFFERENCES])}{more}. {advice}"
            )
