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

import torch

from ..data.pack import Pack, special_ids
from ..errors import ConfigError, VerificationError
from ..files import refuse_folder_in_use
from ..modeling.factory import new_model
from ..planning import export_bytes
from ..sections import RunConfig
from ..training.agreement import agree_on_checkpoint, failure_told, loss_told
from ..training.arguments import LMTrainingArguments, training_arguments
from ..training.checkpoint import list_checkpoints
from ..training.folder import is_start_that_was_killed
from ..training.processes import gathered
from ..training.random_state import undisturbed_random
from ..training.trainer import LMTrainer
from . import chat, data, environment, inputs, maths, model
from .checks import Check, none_failed, not_run, run_rules
from .report import report_lines, summary
from .subject import Subject, scratch_folder

RUN_RULES = (*data.RULES, *model.RULES, *maths.RULES, *environment.RULES)
CHAT_RULES = (*chat.RULES, *(each for each in RUN_RULES[len(data.RULES) :] if each.name not in chat.NOT_OF_CHAT))


def examine(config: RunConfig) -> list[Check]:
    """Run every check on the run that `config` describes, on this machine, in one process.

    A configuration with conversations describes a chat run; checks that do not apply to it say so.

    Raises:
        ConfigError: a setting is missing, or one that no run can have; a check that fails is no error.
    """
    talks = bool(config.data.conversations)
    needed = {"output_dir": config.training.output_dir}
    if talks:
        needed |= {"init_from": config.training.init_from}
    else:
        needed |= {"shards": config.data.shards, "tokenizer_path": config.tokenizer.tokenizer_path}
    for key, value in needed.items():
        if value is None:
            raise ConfigError(f"{key} is missing. Give it in the configuration, or as --{key} DIR.")
    return _examine_chat(chat.ChatInputs(config)) if talks else _examine_pretraining(inputs.Inputs(config))


def _examine_pretraining(given: inputs.Inputs) -> list[Check]:
    with undisturbed_random():
        checks = run_rules(inputs.RULES, given)
        if given.pack is None:
            failed = next(check.name for check in checks[1:] if check.ok is not True)
            return [*checks, *not_run(RUN_RULES, failed)]
        pack, config = given.pack, given.config
        vocab_size, length = pack.shards.vocab_size, config.data.sequence_length
        built = new_model(config.model, vocab_size, length, config.training.seed, **special_ids(pack.tokenizer))
        with _scratch(given.output_dir, usable=bool(checks[0].ok)) as scratch:
            args = _arguments(config, scratch)
            trainer = LMTrainer(
                built, args, pack.train, pack.validation, pack.tokenizer, run_facts=pack.identity,
                export_bytes=export_bytes(built.config.shape, config.export.gguf),
            )  # fmt: skip
            subject = Subject(config, trainer, pack, given.output_dir, scratch)
            return checks + run_rules(RUN_RULES, subject, before=checks)


def _examine_chat(given: chat.ChatInputs) -> list[Check]:
    with undisturbed_random():
        checks = run_rules(chat.INPUT_RULES, given)
        if given.chats is None or given.model is None:
            failed = next(check.name for check in checks[1:] if check.ok is not True)
            return [*checks, *not_run(CHAT_RULES, failed), *chat.not_of_chat()]
        with _scratch(given.output_dir, usable=bool(checks[0].ok)) as scratch:
            args = _arguments(given.config, scratch)
            args.init_from = str(given.base)
            trainer = LMTrainer(
                given.model, args, given.chats.train, given.chats.test, given.tokenizer, run_facts=given.chats.identity,
                export_bytes=export_bytes(given.model.config.shape, given.config.export.gguf),
            )  # fmt: skip
            subject = Subject(given.config, trainer, given.chats, given.output_dir, scratch)
            return [*checks, *run_rules(CHAT_RULES, subject, before=checks), *chat.not_of_chat()]


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
        checks = run_rules(rules, subject, gather=lambda own: gathered(trainer.accelerator, own))
    gc.collect()  # copies of the model, before the run needs the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if none_failed(checks):
        if main:
            print(summary(checks), flush=True)
        return
    if main:
        print("\n".join(report_lines(checks)), file=sys.stderr, flush=True)
    raise VerificationError(
        f"{summary(checks)}. Nothing was trained. Repair what they name, or set preflight: false to train anyway."
    )


def _arguments(config: RunConfig, scratch: Path) -> LMTrainingArguments:
    """Those of the recipe, except that the run reports to nobody and has the scratch folder."""
    own = copy.deepcopy(config)
    own.training.output_dir, own.training.report_to = str(scratch / "run"), []
    args = training_arguments(own)
    args.disable_tqdm = True
    return args


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
    own = None
    with contextlib.ExitStack() as stack:
        if trainer.is_world_process_zero():
            own = str(stack.enter_context(scratch_folder(trainer.output_dir)))
        yield Path(gathered(trainer.accelerator, own)[0])
        trainer.accelerator.wait_for_everyone()
