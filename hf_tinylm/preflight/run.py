"""Preflight of a configuration, as a command, and of a trainer, as the first step of a recipe.

Both leave everything as if they had not run: checks train copies of the model, write into a folder of their own that is
removed, and every random generator is put back.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..data.pack import Pack, special_ids
from ..errors import ConfigError, VerificationError
from ..files import refuse_folder_in_use
from ..modeling.factory import new_model
from ..planning import export_bytes
from ..sections import RunConfig
from ..training.agreement import agree_on_checkpoint, failure_told, loss_told
from ..training.arguments import training_arguments
from ..training.checkpoint import list_checkpoints
from ..training.folder import is_start_that_was_killed
from ..training.random_state import undisturbed_random
from ..training.trainer import LMTrainer
from . import data, environment, inputs, maths, model
from .checks import Check, not_run, run_rules
from .report import report_lines, summary
from .subject import Subject, gathered, scratch_folder

RUN_RULES = (*data.RULES, *model.RULES, *maths.RULES, *environment.RULES)


def examine(config: RunConfig) -> list[Check]:
    """Run every check on the run that `config` describes, on this machine, in one process.

    Raises:
        ConfigError: a setting is missing, or one that no run can have; a check that fails is no error.
    """
    for key, value in (
        ("output_dir", config.training.output_dir),
        ("shards", config.data.shards),
        ("tokenizer_path", config.tokenizer.tokenizer_path),
    ):
        if value is None:
            raise ConfigError(f"{key} is missing. Give it in the configuration, or as --{key} DIR.")
    given = inputs.Inputs(config)
    with undisturbed_random():
        checks = run_rules(inputs.RULES, given)
        if given.pack is None:
            failed = next(check.name for check in checks[1:] if check.ok is not True)
            return [*checks, *not_run(RUN_RULES, failed)]
        with _scratch(given.output_dir, usable=bool(checks[0].ok)) as scratch:
            trainer = _trainer(config, given.pack, scratch)
            subject = Subject(config, trainer, given.pack, given.output_dir, scratch)
            checks += run_rules(RUN_RULES, subject, before=checks)
    return checks


def check_before_training(trainer: LMTrainer, pack: Pack, config: RunConfig) -> None:
    """Run the checks before the first update, on all processes; before a resume only those that are cheap.

    Raises:
        ConfigError: the run's folder is in use.
        VerificationError: a check failed; the table on stderr says which.
    """
    main, folder = trainer.is_world_process_zero(), trainer.output_dir
    resumed = config.training.resume_from_checkpoint is not None and bool(list_checkpoints(folder))
    with failure_told():
        if main and not resumed and not is_start_that_was_killed(folder):
            refuse_folder_in_use(folder)
    agree_on_checkpoint(list_checkpoints(folder)[-1] if resumed else None)  # it decides the rules
    rules = [rule for rule in RUN_RULES if rule.on_resume or not resumed]
    with undisturbed_random(), loss_told(), _shared_scratch(trainer) as scratch:
        subject = Subject(config, trainer, pack, folder, scratch)
        checks = run_rules(rules, subject, gather=lambda own: gathered(trainer, own))
    gc.collect()  # copies of the model, before the run needs the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if all(check.ok for check in checks):
        if main:
            print(summary(checks), flush=True)
        return
    if main:
        print("\n".join(report_lines(checks)), file=sys.stderr, flush=True)
    raise VerificationError(
        f"{summary(checks)}. Nothing was trained. Repair what they name, or set preflight: false to train anyway."
    )


def _trainer(config: RunConfig, pack: Pack, scratch: Path) -> LMTrainer:
    """The trainer that the recipe would make, except that it reports to nobody and has the scratch folder."""
    own = copy.deepcopy(config)
    own.training.output_dir, own.training.report_to = str(scratch / "run"), []
    args = training_arguments(own)
    args.disable_tqdm = True
    vocab_size, length = pack.shards.vocab_size, config.data.sequence_length
    built = new_model(config.model, vocab_size, length, config.training.seed, **special_ids(pack.tokenizer))
    return LMTrainer(
        built, args, pack.train, pack.validation, export_bytes=export_bytes(built.config.shape, config.export.gguf)
    )


@contextlib.contextmanager
def _scratch(output_dir: Path, usable: bool) -> Iterator[Path]:
    """A folder on the volume of `output_dir`; where nothing can be written, one for temporary files."""
    if usable:
        with scratch_folder(output_dir) as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)


@contextlib.contextmanager
def _shared_scratch(trainer: LMTrainer) -> Iterator[Path]:
    """One folder for all processes, made and removed by the main one."""
    shared: list[Any] = [None]
    with contextlib.ExitStack() as stack:
        if trainer.is_world_process_zero():
            shared = [str(stack.enter_context(scratch_folder(trainer.output_dir)))]
        if trainer.accelerator.num_processes > 1:
            torch.distributed.broadcast_object_list(shared, src=0)
        yield Path(shared[0])
        trainer.accelerator.wait_for_everyone()
