"""Checks of the machine: folder, disk, memory, speed, signals, processes, and that a resume here is exact."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import signal
import time
from typing import Any

import psutil
import torch
from transformers.trainer_utils import IntervalStrategy

from ..errors import RunStopped
from ..planning.memory import MemorySettings, peak_memory
from ..training.checkpoint import checkpoint_fault, list_checkpoints, read_checkpoint
from ..training.clocks import synchronise
from ..training.interrupt import INTERRUPT, SIGNALS
from ..training.metrics import METRICS, read_rows
from ..training.optimizer import optimizer_tensors
from ..training.processes import gathered
from ..training.trainer import LMTrainer
from .checks import Finding, rule
from .maths import LEARNS
from .subject import Subject, existing_parent

ESTIMATE_ERROR = 0.15  # of the planned peak of memory


@rule("disk", "the run would end at a save on a full disk", on_resume=True)
def disk(subject: Subject) -> Finding:
    """The volume of the run's folder has room for all that the run will write."""
    needed, what = subject.trainer.record.disk_needed(subject.output_dir)
    free = shutil.disk_usage(existing_parent(subject.output_dir)).free
    return Finding(free >= needed, f"{free / 1e9:.2f} GB free", f"{needed / 1e9:.2f} GB: {what}")


@rule("memory", "the run would be killed, or the device would run out of memory, within its first update")
def memory(subject: Subject) -> Finding:
    """The planned peak of this process fits into what is free and what the process holds already."""
    args, plan, config = subject.trainer.args, subject.trainer.plan, subject.config
    on_cpu = subject.device.type != "cuda"
    settings = MemorySettings(
        tokens=plan.per_device_train_batch_size * plan.sequence_length,
        sequence_length=plan.sequence_length,
        bf16=bool(args.bf16 or args.fp16),
        checkpointing=config.training.gradient_checkpointing,
        eager_attention=config.model.attn_implementation == "eager",
        document_attention=config.data.document_attention or bool(config.data.conversations),
        on_cpu=on_cpu,
        compiled=bool(args.torch_compile),
        optim=config.training.optim,
    )
    needed = sum(peak_memory(subject.model_config.shape, settings).values())
    if on_cpu:
        free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free += psutil.Process().memory_info().rss
    else:
        free = torch.cuda.mem_get_info(subject.device)[0] + torch.cuda.memory_reserved(subject.device)
    words = f"about {needed / 1e9:.2f} GB at the peak"
    return Finding(free >= (1 - ESTIMATE_ERROR) * needed, f"{free / 1e9:.2f} GB free or held by this process", words)


@rule(
    "throughput",
    "a micro-batch does not fit: lower per_device_train_batch_size, or use gradient_checkpointing",
    needs=LEARNS,
)
def throughput(subject: Subject) -> Finding:
    """A micro-batch of the run's own size runs; its time says how long the run will take."""
    plan, batch = subject.trainer.plan, subject.batches(1)[0]
    model = subject.probe()
    if subject.trainer.args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    update = subject.update(model)
    seconds = 0.0
    for _ in range(2):  # the first one warms up
        began = time.monotonic()
        with subject.precision():
            update.run([batch], 0.0)
        synchronise(subject.device)
        seconds = time.monotonic() - began
    positions = batch["input_ids"].numel() * subject.trainer.accelerator.num_processes
    rate = positions / seconds * plan.supervised_tokens / plan.train_tokens
    hours = plan.supervised_tokens / rate / 3600
    subject.trainer.expected_tokens_per_second = rate  # kept in run.json: the report compares it with what came
    value = f"about {rate:,.0f} tokens/s, {hours:.2f} hours for {plan.supervised_tokens:,} tokens"
    computed = f" in {plan.train_tokens:,} positions" if plan.masked_tokens else ""
    return Finding(True, f"{value}{computed} and {plan.updates:,} updates", "it runs")


@rule("signals", "Ctrl-C or the end of a session would kill the run without a save", on_resume=True)
def signals(subject: Subject) -> Finding:
    """While the run trains, SIGINT, SIGTERM and SIGHUP ask it to stop after a save."""
    with INTERRUPT.deferred():
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [signal.Signals(n).name for n, held in handlers.items() if getattr(held, "__self__", None) is INTERRUPT]
    others = [n for n, held in handlers.items() if getattr(held, "__self__", None) is not INTERRUPT]
    unheeded = [signal.Signals(n).name for n in others if handlers[n] is not signal.SIG_IGN]  # nohup ignores SIGHUP
    value = f"{', '.join(ours) or 'none'} handled{f', {unheeded} not' if unheeded else ''}"
    return Finding(not unheeded, value, "all that are not ignored")


@rule(
    "windows",
    "processes or micro-batches share windows, or one has fewer updates: it would wait for ever",
    on_resume=True,
)
def windows(subject: Subject) -> Finding:
    """The first updates of all processes together take each window once, in equal numbers of micro-batches."""
    plan = subject.trainer.plan
    number = min(2, plan.updates)
    own, updates = subject.noted(number)
    found = gathered(subject.trainer.accelerator, (own.tolist(), [len(update) for update in updates], plan.updates))
    taken = sorted(k for ks, _, _ in found for k in ks)
    equal = all(one[1:] == found[0][1:] for one in found)
    wanted = plan.windows_before(number)
    each_once = taken == list(range(wanted))
    value = f"{len(set(taken)):,} different of {len(taken):,} windows in {number} updates"
    value += "" if equal else f"; updates of each process {[one[2] for one in found]}"
    return Finding(each_once and equal, value, f"windows 0 to {wanted - 1:,}, each once")


@rule("processes", "processes start from different weights: their averaged gradients would fit none of them")
def processes(subject: Subject) -> Finding:
    """Every process holds the same weights."""
    digest = hashlib.sha256()
    for parameter in subject.trainer.model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    found = gathered(subject.trainer.accelerator, digest.hexdigest())
    return Finding(
        len(set(found)) == 1, f"{len(set(found))} different sets of weights", f"1, on {len(found)} processes"
    )


@rule(
    "save", "the disk or the file format does not give back what was written", needs=(*LEARNS, "output folder", "disk")
)
def save(subject: Subject) -> Finding:
    """A checkpoint of a probe run in the output folder's volume, read again, holds the same bits as the run."""
    began = time.monotonic()
    stopped = probe_run(subject, "stopped", stop_after_updates=1)
    folders = list_checkpoints(stopped.output_dir)
    fault = checkpoint_fault(folders[-1]) if folders else "there is none"
    if fault:
        return Finding(False, f"the checkpoint is not whole: {fault}", "the bits of the run")
    written = read_checkpoint(folders[-1])
    held = {name: tensor for name, tensor in stopped.model.state_dict().items() if name in written.weights}
    differing = _different(written.weights, held)
    differing += _different(written.optimizer, optimizer_tensors(stopped.optimizer, stopped.model))
    size = sum(path.stat().st_size for path in folders[-1].iterdir())
    value = f"{len(differing)} tensors differ after {size:,} bytes; {time.monotonic() - began:.1f} s with an update"
    return Finding(not differing and bool(held), value, "0")


@rule(
    "resume",
    "something that decides the run is not in its checkpoint, or the machine does not repeat sums",
    needs=("save",),
)
def resume(subject: Subject) -> Finding:
    """A run of two updates that was stopped after the first ends with the same bits as one that was not."""
    whole = probe_run(subject, "whole")
    resumed = probe_run(subject, "stopped", resume_from_checkpoint="auto")
    differing = _different(whole.model.state_dict(), resumed.model.state_dict())
    ends = [list_checkpoints(trainer.output_dir)[-1] for trainer in (whole, resumed)]
    first, second = (read_checkpoint(folder) for folder in ends)
    differing += _different(first.optimizer, second.optimizer)
    for one, other in zip(first.random_states, second.random_states, strict=True):
        differing += _different(one, other)
    losses = [[row["loss"] for row in read_rows(t.output_dir / METRICS)] for t in (whole, resumed)]
    value = f"{len(differing)} tensors differ; losses {' and '.join(map(str, losses))}"
    equal = not differing and losses[0] == losses[1]
    return Finding(equal, "equal bits" if equal else value, "equal bits")


def probe_run(subject: Subject, name: str, **settings: Any) -> LMTrainer:
    """Two updates of the run, as small as they can be, with a copy of its model in the scratch folder."""
    args, plan = copy.copy(subject.trainer.args), subject.trainer.plan  # made anew, they would reset accelerate's state
    batch = 2 * plan.sequence_length * plan.world_size
    targets_of = getattr(subject.trainer.train_dataset, "targets_of", int)  # where not every position is one
    fields = {
        **{"output_dir": str(subject.scratch / name), "per_device_train_batch_size": 1, "global_batch_tokens": batch},
        **{
            "train_tokens": targets_of(2 * batch),
            "warmup_steps": 0,
            "report_to": [],
            "eval_strategy": IntervalStrategy.NO,
        },
        **{"save_strategy": IntervalStrategy.NO, "disable_tqdm": True, "init_optimizer": False},
        **dict.fromkeys(
            ("init_from", "milestone_steps", "save_minutes", "stop_after_updates", "max_hours", "max_cost")
        ),
        **{"batch_growth": [], "mirror_dir": None, "resume_from_checkpoint": None},
    }
    for key, value in {**fields, **settings}.items():
        setattr(args, key, value)
    trainer = LMTrainer(subject.probe(), args, subject.trainer.train_dataset)
    try:
        trainer.train()
    except RunStopped:
        if INTERRUPT.requested or args.stop_after_updates is None:
            raise
    return trainer


def _different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(first.keys() | second.keys())
    return [n for n in names if n not in first or n not in second or not torch.equal(first[n].cpu(), second[n].cpu())]


RULES = (disk, memory, windows, processes, signals, throughput, save, resume)
