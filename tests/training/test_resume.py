"""Checkpoints: whole or absent, and a resume that continues bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.errors import CheckpointError, ConfigError, ContractError
from hf_tinylm.files import sha256_of_file
from hf_tinylm.modeling.factory import load_model
from hf_tinylm.training.checkpoint import checkpoint_fault, list_checkpoints, rotate_checkpoints, select_checkpoint
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
RUN = {
    "model": {"attention_dropout": 0.1},
    "train_tokens": 12 * 256 - 51,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": None,
}


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clocks = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]


# One update of 256 positions, 8 of 512, 3 of 768, the last cut off: the run is stopped at both growth points too.
GROWTH = {"batch_growth": [[256, 512], [4_300, 768]], "train_tokens": 256 + 8 * 512 + 3 * 768 - 51}
MUON = {"optim": "muon", "muon_momentum_warmup_steps": 10, "gain_lr_ratio": 2.0, "lr_schedule": "wsd"}


@pytest.mark.parametrize(
    ("order", "fields"),
    [("permutation", {}), ("random", {}), ("permutation", MUON), ("permutation", GROWTH)],
    ids=["shuffled", "random", "muon", "growth"],
)
@pytest.mark.parametrize(
    "stops", [(1, 9, 11), pytest.param(tuple(range(1, 12)), marks=pytest.mark.slow)], ids=["three", "every"]
)
def test_a_run_resumed_at_any_update_ends_bit_for_bit_as_the_uninterrupted_one(
    make_trainer: Make, ragged_windows: Make, tmp_path: Path, order: str, fields: dict[str, Any], stops: tuple[int, ...]
) -> None:
    """Dropout, masked targets, validation, an epoch border (update 9), shard borders and a partial end are crossed."""
    whole = make_trainer("whole", train=ragged_windows(order), **{**RUN, **fields})
    whole.train()
    assert whole.plan.updates == 12
    end = whole.output_dir / "checkpoint-00000012"
    for stop in stops:
        folder = tmp_path / f"resumed{stop}"
        shutil.copytree(whole.output_dir, folder)
        for later in list_checkpoints(folder)[stop:]:
            shutil.rmtree(later)
        again = {**RUN, **fields, "resume_from_checkpoint": "auto"}
        resumed = make_trainer(folder.name, train=ragged_windows(order), **again)
        resumed.train()
        for name in ("model.safetensors", "optimizer.safetensors", "rng-00000.safetensors"):
            first, second = load_file(end / name), load_file(folder / end.name / name)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[key], second[key]) for key in first), (stop, name)
        rows = [read_rows(run.output_dir / "metrics.jsonl") for run in (whole, resumed)]
        assert untimed(rows[0]) == untimed(rows[1])
        assert "resumed" in [row["event"] for row in read_rows(folder / "events.jsonl")]


def test_an_interrupted_save_is_passed_over_and_named(make_trainer: Make) -> None:
    trainer = make_trainer(**RUN)
    trainer.train()
    broken = trainer.output_dir / "checkpoint-00000099"
    broken.mkdir()
    shutil.copy(trainer.output_dir / "checkpoint-00000012" / "model.safetensors", broken)
    folder, passed_over = select_checkpoint(trainer.output_dir, "auto")
    assert folder is not None
    assert folder.name == "checkpoint-00000012"
    assert passed_over == [
        "checkpoint-00000099 was passed over: it has no manifest.json, so its saving was not finished"
    ]
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        select_checkpoint(trainer.output_dir, str(broken))


def test_a_flipped_byte_in_any_file_is_found(make_trainer: Make) -> None:
    trainer = make_trainer(train_tokens=256, warmup_steps=0)
    trainer.train()
    folder = list_checkpoints(trainer.output_dir)[-1]
    assert checkpoint_fault(folder) is None
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "rng-00000.safetensors",
        "trainer_state.json",
    ]  # fmt: skip
    for name in names:
        content = (folder / name).read_bytes()
        middle = len(content) // 2
        (folder / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert checkpoint_fault(folder) is not None, name
        (folder / name).write_bytes(content)
    assert checkpoint_fault(folder) is None


def test_rotation_follows_the_integer_step_not_the_name_or_the_time(tmp_path: Path) -> None:
    for name in (
        "checkpoint-9900",
        "checkpoint-10000",
        "checkpoint-00000500",
        "checkpoint-final",
        ".tmp-checkpoint-1-ab",
    ):
        (tmp_path / name).mkdir()
    removed = rotate_checkpoints(tmp_path, 1)
    assert [path.name for path in removed] == ["checkpoint-00000500", "checkpoint-9900"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10000", "checkpoint-final"]


def test_a_resume_with_other_settings_is_refused_with_both_values(make_trainer: Make) -> None:
    make_trainer(**RUN).train()
    with pytest.raises(ContractError, match=r"training\.learning_rate: 0\.001 -> 0\.002"):
        make_trainer(**{**RUN, "learning_rate": 2e-3}, resume_from_checkpoint="auto").train()
    changed = make_trainer(**RUN, per_device_train_batch_size=4, resume_from_checkpoint="auto")
    changed.train()
    events = read_rows(changed.output_dir / "events.jsonl")
    assert events[-1]["changed"] == ["per_device_train_batch_size: 2 -> 4"]


def test_a_branch_starts_from_the_weights_of_a_checkpoint_and_records_where_it_came_from(make_trainer: Make) -> None:
    parent = make_trainer("parent", **RUN)
    parent.train()
    source = parent.output_dir / "checkpoint-00000006"
    child = make_trainer("child", learning_rate=5e-4, init_from=str(source), save_strategy="steps", save_steps=1)
    child.train()
    contract = json.loads((child.output_dir / "run.json").read_text())
    lineage = contract["identity"]["training"]["init_from"]
    assert lineage["weights_sha256"]["model.safetensors"] == sha256_of_file(source / "model.safetensors")
    assert lineage["parent_identity"]["training"]["learning_rate"] == 1e-3
    first = read_rows(child.output_dir / "metrics.jsonl")[0]["loss"]
    fresh = read_rows(parent.output_dir / "metrics.jsonl")[0]["loss"]
    assert first < fresh - 0.1, "the branch must start where the parent was, not afresh"
    moments = load_file(child.output_dir / "checkpoint-00000001" / "optimizer.safetensors")
    assert float(moments["step.model.norm.weight"]) == 1.0


def test_a_branch_with_the_optimizer_continues_its_moments(make_trainer: Make) -> None:
    parent = make_trainer("parent", **RUN)
    parent.train()
    source = parent.output_dir / "checkpoint-00000006"
    fields = {"init_from": str(source), "init_optimizer": True, "save_strategy": "steps", "save_steps": 1}
    child = make_trainer("child", **fields)
    child.train()
    moments = load_file(child.output_dir / "checkpoint-00000001" / "optimizer.safetensors")
    assert float(moments["step.model.norm.weight"]) == 7.0


def test_a_branch_is_resumed_after_its_parent_is_gone(make_trainer: Make) -> None:
    parent = make_trainer("parent", **RUN)
    parent.train()
    fields = {**RUN, "init_from": str(parent.output_dir / "checkpoint-00000006")}
    child = make_trainer("child", **fields)
    child.train()
    shutil.rmtree(parent.output_dir)
    shutil.rmtree(child.output_dir / "checkpoint-00000012")
    assert make_trainer("child", **fields, resume_from_checkpoint="auto").train().global_step == 12


def test_a_branch_starts_from_a_final_folder_too(make_trainer: Make) -> None:
    parent = make_trainer("parent", **RUN)
    parent.train()
    parent.save_model()
    child = make_trainer("child", init_from=str(parent.output_dir / "final"), save_strategy="steps", save_steps=1)
    child.train()
    first, second = (read_rows(run.output_dir / "metrics.jsonl")[0]["loss"] for run in (parent, child))
    assert second < first - 0.1


def test_a_wrong_start_of_a_branch_leaves_the_folder_free(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a model folder"):
        make_trainer("child", init_from=str(tmp_path)).train()
    assert make_trainer("child").train().global_step == 6


def test_a_checkpoint_of_another_run_is_no_resume(make_trainer: Make) -> None:
    first, second = make_trainer("first", **RUN), make_trainer("second", **{**RUN, "learning_rate": 5e-2})
    first.train()
    second.train()
    foreign = str(second.output_dir / "checkpoint-00000004")
    with pytest.raises(ContractError, match="checkpoint of another run"):
        make_trainer("first", **RUN, resume_from_checkpoint=foreign).train()


def test_resuming_by_the_argument_of_train_works_as_in_hugging_face(make_trainer: Make) -> None:
    make_trainer(**RUN).train()
    assert make_trainer(**RUN).train(resume_from_checkpoint=True).global_step == 12


def test_a_branch_from_a_model_of_another_shape_is_refused(make_trainer: Make) -> None:
    parent = make_trainer("parent", train_tokens=256, warmup_steps=0)
    parent.train()
    source = str(parent.output_dir / "checkpoint-00000001")
    with pytest.raises(ContractError, match="another shape"):
        make_trainer("child", model={"intermediate_size": 32}, init_from=source).train()


def test_the_best_checkpoint_and_milestones_outlive_rotation(make_trainer: Make) -> None:
    fields = {**RUN, "eval_steps": 1, "save_total_limit": 1, "milestone_steps": 5}
    trainer = make_trainer(**fields)
    losses = iter([5.0, 4.0, 1.0, 6.0, 5.0, 4.0, 3.0, 4.0, 5.0, 4.0, 3.0, 2.0])
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": next(losses), "eval_tokens": 1.0}
    trainer.train()
    assert [path.name[-2:] for path in list_checkpoints(trainer.output_dir)] == ["03", "05", "10", "12"]


def test_save_best_saves_whenever_validation_is_the_best_so_far(make_trainer: Make) -> None:
    fields = {**RUN, "eval_steps": 1, "save_strategy": "no", "save_best": True}
    trainer = make_trainer(**fields)
    losses = iter([5.0, 4.0, 4.5, 6.0, 3.0, 4.0, 3.0, 4.0, 5.0, 4.0, 3.0, 3.5])
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": next(losses), "eval_tokens": 1.0}
    trainer.train()
    assert [path.name[-2:] for path in list_checkpoints(trainer.output_dir)] == ["01", "02", "05", "12"]


def test_the_reason_and_the_expectation_of_a_run_are_kept(make_trainer: Make) -> None:
    trainer = make_trainer(note="a wider model", expect="lower loss at equal tokens")
    trainer.train()
    facts = json.loads((trainer.output_dir / "run.json").read_text())["facts"]
    assert (facts["note"], facts["expect"]) == ("a wider model", "lower loss at equal tokens")


def test_auto_in_an_empty_folder_starts_and_in_a_foreign_folder_refuses(make_trainer: Make, tmp_path: Path) -> None:
    assert make_trainer("new", resume_from_checkpoint="auto").train().global_step == 6
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        make_trainer("foreign", resume_from_checkpoint="auto").train()


def test_a_finished_run_refuses_to_resume(make_trainer: Make) -> None:
    trainer = make_trainer(**RUN)
    trainer.train()
    (trainer.output_dir / "DONE.json").write_text("{}")
    with pytest.raises(ContractError, match="finished run"):
        make_trainer(**RUN, resume_from_checkpoint="auto").train()


def test_a_checkpoint_opens_as_a_model_by_itself(make_trainer: Make) -> None:
    trainer = make_trainer(**RUN)
    trainer.train()
    model = load_model(trainer.output_dir / "checkpoint-00000012")
    ids = torch.arange(4, 36)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model.eval()(ids).logits)


def test_the_manifest_lists_every_file_with_its_size(make_trainer: Make) -> None:
    trainer = make_trainer(train_tokens=256, warmup_steps=0)
    trainer.train()
    folder = list_checkpoints(trainer.output_dir)[-1]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 1
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
    }
