"""What a run leaves in its folder, and how it is taken up again: contract, checkpoints, rows, clocks."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..contract import RUN_FILE, check_contract, new_contract, write_contract
from ..data.local_copy import local_copy
from ..errors import CheckpointError, ContractError
from ..files import read_record, refuse_folder_in_use, sha256_of_json
from ..modeling.native import native_kernels_of
from ..planning.disk import checkpoints_kept
from ..planning.optimizer import checkpoint_bytes
from .agreement import agree_on_checkpoint, agree_on_state, all_are_here, failure_told
from .checkpoint import Snapshot, list_checkpoints, read_checkpoint, select_checkpoint, set_aside_newer
from .clocks import Clocks
from .device import device_name
from .folder import RunLock, check_disk, is_start_that_was_killed, leftovers, remove_leftovers, size_of
from .inputs import input_facts
from .lineage import changed_since, check_branch, check_tokenizer, check_weights, initialise_from, lineage
from .metrics import EVENTS, METRICS, Events, JsonLines
from .mirror import Mirror
from .optimizer import load_optimizer_tensors, optimizer_tensors
from .processes import gathered
from .random_state import random_tensors
from .saver import CheckpointSaver, HostCopies
from .xla import xla_notices

if TYPE_CHECKING:
    from ..modeling.model import TinyLMForCausalLM
    from .trainer import LMTrainer

# Arguments that decide the numbers of a run; all others may differ between its invocations.
IDENTITY_ARGUMENTS = (
    *("learning_rate", "min_lr_ratio", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "bf16", "fp16", "nonfinite", "nonfinite_limit", "seed", "eval_tokens"),
)
# Recorded where they are not the default, so that runs of versions without them go on.
ADDED_ARGUMENTS = (
    *("optim", "embedding_lr_ratio", "head_lr_ratio", "gain_lr_ratio", "muon_momentum", "muon_momentum_warmup_steps"),
    *("muon_ns_steps", "lr_schedule", "decay_fraction", "decay_shape"),
)
# Execution whose change alters the order of floating-point sums.
CHANGES_BITS = (
    *("processes", "device", "cpu_threads", "per_device_train_batch_size", "torch_compile", "torch"),
    *("attn_implementation", "native_kernels", "loss_kernel", "tf32", "device_name"),
)


class RunRecord:
    """The files of one run, held by the trainer. Every method is called by all processes; the main one writes."""

    def __init__(self, trainer: LMTrainer, began: float) -> None:
        self.trainer = trainer
        self.output_dir = trainer.output_dir
        self.main = trainer.is_world_process_zero()
        self.metrics = JsonLines(self.output_dir / METRICS, enabled=self.main)
        self.events = Events(self.output_dir / EVENTS, enabled=self.main)
        self.lock = RunLock(self.output_dir)
        self.mirror = Mirror(self.output_dir, trainer.args.mirror_dir if self.main else None, self._warn)
        self.clocks = Clocks(began=began)
        self._keeps_folder = False
        args = trainer.args
        self.saver = CheckpointSaver(
            self.output_dir, self.events, args.save_total_limit, args.milestone_steps, args.save_in_background
        )

    def open(self, asked: str | None) -> bool:
        """Take the folder, write or check the contract, and restore what is asked; whether a checkpoint was restored.

        Raises:
            ContractError: the folder records another run, a finished one, or is being written.
            CheckpointError: a checkpoint that was named is not whole.
            ConfigError: a new run in a folder in use, or too little room on its disk.
            DisagreementError: another process would go on from another checkpoint or start from other weights.
        """
        resumed = self._open(asked)
        agree_on_state(self.trainer)
        return resumed

    def _open(self, asked: str | None) -> bool:
        with failure_told():
            folder, passed_over = select_checkpoint(self.output_dir, asked, self._nearby) if asked else (None, [])
        agree_on_checkpoint(folder)
        with failure_told():
            branch, begun, changed = self._take(bool(asked), folder, passed_over)
        all_are_here()  # and have selected their checkpoint before any is renamed
        if folder is not None:
            snapshot = read_checkpoint(self._nearby(folder))
            thrown_away = self._restore(snapshot, folder)
            self.events.add("resumed", snapshot.step, checkpoint=folder.name, changed=changed, **thrown_away)
            self._go_back_to(snapshot.step)
            return True
        plan = self.trainer.plan
        dropped = getattr(self.trainer.train_dataset, "dropped_ids", None)  # ids that no window supervises
        facts = {"updates": plan.updates, "train_tokens": plan.supervised_tokens, "dropped_ids": dropped}
        if branch is not None:
            snapshot = read_checkpoint(self._nearby(branch, "branch"))
            self.metrics.begin_with(branch.parent / METRICS, snapshot.step)
            self.events.add("started", snapshot.step, **facts, branch_from=str(branch), **self._restore(snapshot))
            return True
        self.events.add("started", 0, **facts, **begun, **self._continue_clocks({}, 0))
        self._go_back_to(0)
        return False

    def _take(
        self, asked: bool, folder: Path | None, passed_over: list[str]
    ) -> tuple[Path | None, dict[str, Any], list[str]]:
        """Write or check the contract and take the lock.

        Returns:
            The checkpoint to branch from; what is said of weights that were taken up; and changes in execution.
        """
        args = self.trainer.args
        known = asked and (self.output_dir / RUN_FILE).is_file()
        contract = self._contract(known)
        self.identity_sha256 = sha256_of_json(contract["identity"])
        changed = check_contract(self.output_dir, contract) if known or folder is not None else []
        branch = None
        if folder is None and args.branch_from is not None:
            branch = Path(args.branch_from)
            check_branch(branch, contract["identity"], self.trainer.schedule)
        begun = self._begin(args.init_from, contract["identity"]) if folder is None and args.init_from else {}
        if self.main:
            if not known and not is_start_that_was_killed(self.output_dir):
                refuse_folder_in_use(self.output_dir)
            self.mirror.check(known)
            check_disk(self.output_dir, *self.disk_needed(self.output_dir))
            trace = self.lock.acquire()
            remove_leftovers(self.output_dir)
            if not known:
                write_contract(self.output_dir, contract)
            self._tell(trace, passed_over, changed)
            self.mirror.start()
        return branch, begun, changed

    def _begin(self, init_from: str, identity: dict[str, Any]) -> dict[str, Any]:
        """Take up the weights that a new run begins with; what its first event says of them."""
        found = self.take_up(init_from, self.trainer.model, self.trainer.optimizer)
        recorded = identity["training"]["init_from"] or {}  # which the main process has
        changed = changed_since(recorded.get("parent_identity"), identity)
        inherited = recorded.get("inherited_tokens")
        return {"init_from": init_from, "inherited_tokens": inherited, **found, "changed": changed}

    def take_up(self, init_from: str, model: TinyLMForCausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Copy the weights of a checkpoint or model folder, and the moments if asked, into `model` and `optimizer`.

        Raises:
            TokenizerError, ConfigError, ContractError, CheckpointError: as `check_tokenizer`, `check_weights` and
                `initialise_from` of `lineage`.
        """
        check_tokenizer(init_from, self.trainer.run_facts.get("tokenizer_sha256"))
        check_weights(init_from)
        start = str(self._nearby(Path(init_from), "init_from"))
        return initialise_from(start, self.trainer.args.init_optimizer, model, optimizer)

    def save(self, evaluation_due: bool, eval_loss: float | None) -> None:
        """Save the state after the present update; the write goes on in the background."""
        states = gathered(self.trainer.accelerator, random_tensors())
        with self.clocks.measure("saving_seconds"):
            if self.main:
                self.saver.save(lambda host: self._snapshot(host, states, evaluation_due, eval_loss))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder that training takes until the block ends, whatever is written after the last update.

        Without it the folder is free when training ends, and another process could start before `DONE.json` is there.
        """
        self._keeps_folder = True
        try:
            yield
        finally:
            self._keeps_folder = False
            self.lock.release()

    def close(self) -> None:
        """Wait for the write in flight and give the folder back, unless it is `held`."""
        try:
            if self.main:
                with self.clocks.measure("saving_seconds"):
                    self.saver.wait()
        finally:
            self.mirror.finish()
            if not self._keeps_folder:
                self.lock.release()

    def last_checkpoint(self) -> str | None:
        """Name of the newest checkpoint, after waiting for the write in flight."""
        if self.main:
            self.saver.wait()
        folders = list_checkpoints(self.output_dir)
        return folders[-1].name if folders else None

    def _nearby(self, folder: Path, kind: str = "resume") -> Path:
        """The folder that is read in place of `folder`: itself, or its copy in `stage_dir`."""
        stage_dir = self.trainer.args.stage_dir
        if stage_dir is None:
            return folder
        slot_of = folder.parent if kind == "resume" else folder  # of a run's checkpoints one copy is kept
        return local_copy(folder, Path(stage_dir), kind, slot_of)

    # ---- contract -----------------------------------------------------------------------------------------------

    def _contract(self, known: bool) -> dict[str, Any]:
        """What this run is; `known` when the folder records it already."""
        trainer, args, plan = self.trainer, self.trainer.args, self.trainer.plan
        identity = {
            "model": trainer.model.config.identity,
            "training": {name: getattr(args, name) for name in IDENTITY_ARGUMENTS}
            | {name: value for name in ADDED_ARGUMENTS if (value := getattr(args, name)) != getattr(type(args), name)}
            | {"train_tokens": plan.supervised_tokens, "global_batch_tokens": plan.global_batch_tokens}
            | ({"batch_growth": [list(pair) for pair in args.batch_growth]} if args.batch_growth else {})
            | {"init_from": self._lineage(known, "init_from", args.init_from, args.init_optimizer)}
            | (
                {"branch_from": self._lineage(known, "branch_from", args.branch_from, True)} if args.branch_from else {}
            ),
            "data": {
                "sequence_length": plan.sequence_length,
                "window_order": getattr(trainer.train_dataset, "order", None),
                "document_attention": bool(getattr(trainer.train_dataset, "document_attention", False)),
                "windows_per_epoch": len(trainer.train_dataset),
                **trainer.run_facts,
            },
        }
        device = args.device.type
        execution = {
            "processes": trainer.accelerator.num_processes,
            "device": device,
            "device_name": device_name(args.device),
            "cpu_threads": torch.get_num_threads() if device == "cpu" else None,
            "per_device_train_batch_size": plan.per_device_train_batch_size,
            "per_device_eval_batch_size": args.per_device_eval_batch_size,
            "torch_compile": args.torch_compile,
            "torch": torch.__version__,
            "attn_implementation": trainer.model.config._attn_implementation,
            "native_kernels": native_kernels_of(trainer.model),
            "tf32": args.tf32,
            **({} if trainer.loss_kernel.of_chunk is None else {"loss_kernel": trainer.loss_kernel.name}),
        }
        facts: dict[str, Any] = {"note": args.note, "expect": args.expect}
        facts["expected_tokens_per_second"] = trainer.expected_tokens_per_second
        if self.main and not known:
            sets = (trainer.train_dataset, trainer.eval_dataset)
            facts["inputs"] = input_facts(*sets, plan, args.eval_tokens, trainer.processing_class)
        return new_contract(identity, execution, trainer.run_config, facts)

    def _lineage(self, known: bool, key: str, start: str | None, with_optimizer: bool) -> dict[str, Any] | None:
        """What a branch started from: as recorded, since its parent may be gone by now, or read afresh."""
        if start is None:
            return None
        if known:
            identity = read_record(self.output_dir / RUN_FILE, "identity")["identity"]
            recorded: dict[str, Any] | None = identity["training"].get(key)
            return recorded
        return lineage(start, with_optimizer) if self.main else None

    def _tell(self, trace: str | None, passed_over: list[str], changed: list[str]) -> None:
        """Say what is unusual about this start, on stderr and in the events."""
        notices = [*([trace] if trace else []), *passed_over]
        dataset, args = self.trainer.eval_dataset, self.trainer.args
        if dataset is not None and args.eval_strategy == "steps":
            there = len(dataset) * int(dataset.sequence_length)
            if there < args.eval_tokens:
                notices.append(f"eval_tokens={args.eval_tokens:,} were asked; validation has {there:,}, all are used.")
        if self.trainer.not_compiled:
            notices.append(f"{self.trainer.not_compiled} The run goes on without it; torch_compile: false says so.")
        if self.trainer.loss_kernel.refused:
            notices.append(self.trainer.loss_kernel.told)
        elif args.device.type == "cuda":
            print(self.trainer.loss_kernel.told, file=sys.stderr, flush=True)
        if self.trainer.not_native:
            notices.append(f"{self.trainer.not_native} The run goes on with torch's.")
        if args.device.type == "xla":
            notices += xla_notices(args.noise_scale, self.trainer.accelerator.num_processes)
        altered = [line for line in changed if line.split(":")[0] in CHANGES_BITS]
        if altered:
            notices.append(
                f"Changed since the run was started: {'; '.join(altered)}. "
                "It stays the same run, but its bits can no longer equal those of an uninterrupted one."
            )
        for notice in notices:
            self._notice(notice)

    def _notice(self, notice: str, step: int = 0) -> None:
        print(f"notice: {notice}", file=sys.stderr, flush=True)
        self.events.add("warned", step, reason=notice)

    def _warn(self, notice: str) -> None:
        self._notice(notice, self.trainer.state.global_step)

    def disk_needed(self, output_dir: Path) -> tuple[int, str]:
        """Bytes that the run may still write into its folder, and what they are."""
        trainer, args = self.trainer, self.trainer.args
        shape = trainer.model.config.shape
        kept = checkpoints_kept(
            trainer.plan.updates, int(args.save_steps) if args.save_strategy == "steps" else None, args.save_minutes,
            args.save_total_limit, args.milestone_steps, args.eval_strategy == "steps",
        )  # fmt: skip
        there = len(list_checkpoints(output_dir))
        checkpoints = max(0, kept - there) + 1
        final = 4 * shape.parameters
        each = checkpoint_bytes(shape, args.optim)
        needed = int(checkpoints * each + final + trainer.export_bytes)
        needed -= sum(size_of(path) for path in leftovers(output_dir))  # removed before anything is written
        what = f"{checkpoints} checkpoints of {each / 1e9:.2f} GB, the final model and exports"
        return needed, what

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _snapshot(
        self,
        host: HostCopies,
        random_states: list[dict[str, torch.Tensor]],
        evaluation_due: bool,
        eval_loss: float | None,
    ) -> Snapshot:
        trainer = self.trainer
        tied = trainer.model.config.tie_word_embeddings
        weights = {k: v for k, v in trainer.model.state_dict().items() if not (tied and k == "lm_head.weight")}
        step = trainer.state.global_step
        state = {
            "step": step,
            "epoch": trainer.state.epoch,
            "supervised_tokens": trainer.supervised_tokens,
            "skipped_batches": trainer.skipped_batches,
            "next_window": trainer.plan.windows_before(step) + trainer.skipped_windows,
            "evaluation_due": evaluation_due,
            "eval_loss": eval_loss,
            "best_metric": trainer.state.best_metric,
            "best_global_step": trainer.state.best_global_step,
            # a copy: training goes on while the checkpoint is written
            "callbacks": copy.deepcopy({name: held.state() for name, held in trainer.stateful_callbacks().items()}),
            "scaler": trainer.scaler.state_dict() if trainer.scaler is not None else None,
            "clocks": self.clocks.to_state(),
            "ended": trainer.control.should_training_stop,
            "processes": trainer.accelerator.num_processes,
            "identity_sha256": self.identity_sha256,
            "seed": trainer.args.seed,
        }
        return Snapshot(
            step,
            trainer.model.config.to_dict(),
            host.copy(weights, "weights."),
            host.copy(optimizer_tensors(trainer.optimizer, trainer.model), "optimizer."),
            random_states,
            state,
        )

    def _restore(self, snapshot: Snapshot, folder: Path | None = None) -> dict[str, Any]:
        """Take up a checkpoint, of this run if its folder is given; what the clocks say of updates thrown away."""
        trainer, state = self.trainer, snapshot.trainer_state
        if folder is not None and state.get("identity_sha256") != self.identity_sha256:
            raise ContractError(
                f"{folder} is a checkpoint of another run than {self.output_dir / RUN_FILE} records. Resume one of "
                f"this run's own, or start a branch in a new output_dir: --init_from {folder}."
            )
        missing, unexpected = trainer.model.load_state_dict(snapshot.weights, strict=False)
        tied = {"lm_head.weight"} if trainer.model.config.tie_word_embeddings else set()
        if unexpected or set(missing) - tied:
            raise CheckpointError(f"The checkpoint does not fit the model: missing {missing}, unexpected {unexpected}.")
        load_optimizer_tensors(trainer.optimizer, trainer.model, snapshot.optimizer)
        if len(snapshot.random_states) == trainer.accelerator.num_processes:
            trainer.random_state = snapshot.random_states[trainer.accelerator.process_index]
        trainer.state.global_step = snapshot.step
        trainer.state.epoch = state["epoch"]
        trainer.state.best_metric = state["best_metric"]
        trainer.state.best_global_step = state["best_global_step"]
        trainer.supervised_tokens = int(state["supervised_tokens"])
        trainer.skipped_batches = int(state["skipped_batches"])
        trainer.skipped_windows = int(state["next_window"]) - trainer.plan.windows_before(snapshot.step)
        trainer.evaluation_due = bool(state["evaluation_due"])
        if trainer.scaler is not None and state["scaler"]:
            trainer.scaler.load_state_dict(state["scaler"])
        for name, callback in trainer.stateful_callbacks().items():
            for key, value in state["callbacks"].get(name, {}).get("attributes", {}).items():
                setattr(callback, key, value)
        trainer.ended = bool(state["ended"]) and folder is not None
        return self._continue_clocks(state["clocks"], snapshot.step)

    def _continue_clocks(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        """Let the clocks go on from a checkpoint's; what an event says of the rows beyond it, which go next."""
        if not self.main:
            return {}
        rows, events = self.metrics.rows(), self.events.rows()
        thrown_away = self.clocks.continue_from(state, step, rows, events, self.trainer.flops)
        dropped = sum(row["step"] > step for row in rows)
        return {"dropped_rows": dropped, **thrown_away, "wall_seconds": round(self.clocks.wall_seconds, 6)}

    def _go_back_to(self, step: int) -> None:
        """Drop the rows beyond `step`, after the checkpoints beyond it: killed in between, it is done again."""
        if not self.main:
            return
        for notice in set_aside_newer(self.output_dir, step):
            self._notice(notice)
        self.metrics.drop_after(step)
