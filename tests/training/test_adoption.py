"""Runs that take up another run's weights: what arrives, what is recorded, what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from hf_tinylm.contract import inherited_tokens
from hf_tinylm.errors import CheckpointError, TokenizerError, TrainingError
from hf_tinylm.files import sha256_of_file
from hf_tinylm.training.lineage import sha256_of_weights
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}


class AtTheStart(TrainerCallback):
    """Notes the weights before the first update, and how much the optimizer remembers."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.remembered = sum(float(v.abs().sum()) for held in optimizer.state.values() for v in held.values())


def identity_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())["identity"]
    return found


@pytest.fixture
def parent(make_trainer: Make) -> Any:
    """A run of 4 updates of 64 tokens (two windows) at 5e-4 that has ended."""
    fields = {"train_tokens": 256, "global_batch_tokens": 64, "learning_rate": 5e-4}
    trainer = make_trainer("parent", **fields, **SAVES, run_facts={"tokenizer_sha256": "a" * 64})
    trainer.train()
    return trainer


@pytest.mark.parametrize(("keeps", "moments"), [(True, "kept"), (False, "zero")])
def test_a_branch_begins_with_its_parents_weights_and_with_its_moments_or_none(
    make_trainer: Make, parent: Any, keeps: bool, moments: str
) -> None:
    """Four times the batch and the rate. The hash of the event is computed here from the parent's file alone."""
    source = parent.output_dir / "checkpoint-00000003"
    fields = {"init_from": str(source), "init_optimizer": keeps, "learning_rate": 2e-3, **SAVES}
    seen = AtTheStart()
    child = make_trainer("child", callbacks=[seen], run_facts={"tokenizer_sha256": "a" * 64}, **fields)
    child.train()
    theirs = load_file(source / "model.safetensors")
    assert all(torch.equal(seen.weights[name], tensor) for name, tensor in theirs.items())
    assert set(seen.weights) - set(theirs) == {"lm_head.weight"}, "which is tied"
    digest = hashlib.sha256()
    for name, tensor in sorted({**theirs, "lm_head.weight": theirs["model.embed_tokens.weight"]}.items()):
        digest.update(name.encode() + b"\0" + tensor.numpy().tobytes())
    event = read_rows(child.output_dir / "events.jsonl")[0]
    assert (event["event"], event["init_weights_sha256"], event["moments"]) == ("started", digest.hexdigest(), moments)
    assert (event["init_from"], event["inherited_tokens"]) == (str(source), 3 * 64)
    assert set(event["changed"]) == {
        "training.learning_rate: 0.0005 -> 0.002",
        "training.train_tokens: 256 -> 1536",
        "training.global_batch_tokens: 64 -> 256",
    }
    after = load_file(child.output_dir / "checkpoint-00000001" / "optimizer.safetensors")
    assert (seen.remembered == 0) is not keeps
    assert float(after["step.model.norm.weight"]) == (4.0 if keeps else 1.0)


def test_the_lineage_names_every_generation_by_content_and_adds_up_its_tokens(make_trainer: Make, parent: Any) -> None:
    first = parent.output_dir / "checkpoint-00000003"
    child = make_trainer("child", init_from=str(first), init_optimizer=True, **SAVES)
    child.train()
    child.save_model()
    second = child.output_dir / "checkpoint-00000002"
    grandchild = make_trainer("grandchild", init_from=str(second), **SAVES)
    grandchild.train()
    start = identity_of(grandchild.output_dir)["training"]["init_from"]
    assert start["path"] == str(second.resolve())
    assert start["manifest_sha256"] == sha256_of_file(second / "manifest.json")
    assert start["weights_sha256"] == {"model.safetensors": sha256_of_file(second / "model.safetensors")}
    assert (start["step"], start["parent_tokens"], start["inherited_tokens"]) == (2, 2 * 256, 2 * 256 + 3 * 64)
    assert (start["with_optimizer"], start["parent_identity"]) == (False, identity_of(child.output_dir))
    before = start["parent_identity"]["training"]["init_from"]
    assert (before["step"], before["inherited_tokens"], before["with_optimizer"]) == (3, 192, True)
    assert before["parent_identity"] == identity_of(parent.output_dir)
    assert inherited_tokens(identity_of(parent.output_dir)) == 0
    # one that goes on from the grandchild's checkpoint has its rows, and so its beginning
    same = {"branch_from": str(grandchild.output_dir / "checkpoint-00000002"), "lr_schedule": "constant"}
    identity = {"training": {"branch_from": {"parent_identity": identity_of(grandchild.output_dir)}, **same}}
    identity["training"]["branch_from"] = {"parent_identity": identity_of(grandchild.output_dir)}
    assert inherited_tokens(identity) == 2 * 256 + 3 * 64


def test_a_final_folder_knows_its_tokens_once_its_run_is_done(make_trainer: Make, parent: Any) -> None:
    parent.save_model()
    final = parent.output_dir / "final"
    make_trainer("early", init_from=str(final)).train()
    (parent.output_dir / "DONE.json").write_text(json.dumps({"updates": 4, "supervised_tokens": 256}))
    make_trainer("late", init_from=str(final)).train()
    starts = [identity_of(parent.output_dir.parent / name)["training"]["init_from"] for name in ("early", "late")]
    assert [(s["step"], s["inherited_tokens"], s["manifest_sha256"]) for s in starts] == [
        (None, None, None),
        (4, 256, None),
    ]


def test_weights_of_another_tokenizer_are_refused_and_leave_the_folder_free(make_trainer: Make, parent: Any) -> None:
    source = str(parent.output_dir / "checkpoint-00000003")
    with pytest.raises(
        TokenizerError, match=r"was trained with the tokenizer aaaaaaaaaaaa.*this run has\s+bbbbbbbbbbbb"
    ):
        make_trainer("child", init_from=source, run_facts={"tokenizer_sha256": "b" * 64}).train()
    assert not (parent.output_dir.parent / "child" / "run.json").exists()


@pytest.mark.parametrize(("theirs", "ours"), [("adamw", "muon"), ("muon", "adamw")])
def test_moments_of_another_kind_of_optimizer_are_refused(make_trainer: Make, theirs: str, ours: str) -> None:
    make_trainer("other", optim=theirs, **SAVES).train()
    source = str(make_trainer("other").output_dir / "checkpoint-00000002")
    with pytest.raises(CheckpointError, match=r"they are of different kinds\. Give the optim of the run"):
        make_trainer("child", optim=ours, init_from=source, init_optimizer=True).train()
    make_trainer("child", optim=ours, init_from=source).train()  # weights alone fit any optimizer


def test_moments_that_are_asked_for_must_be_whole(make_trainer: Make, parent: Any) -> None:
    source = parent.output_dir / "checkpoint-00000003"
    tensors = load_file(source / "optimizer.safetensors")
    tensors["exp_avg.model.norm.weight"] += 1
    save_file(tensors, source / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"the SHA-256 of optimizer\.safetensors differs"):
        make_trainer("child", init_from=str(source), init_optimizer=True).train()


def test_an_optimizer_that_has_been_used_does_not_begin_a_branch(make_trainer: Make, parent: Any) -> None:
    child = make_trainer("child", init_from=str(parent.output_dir / "checkpoint-00000003"))
    child.create_optimizer()
    for parameter in child.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    child.optimizer.step()
    with pytest.raises(TrainingError, match="its moments must be zero"):
        child.train()


def test_the_hash_of_weights_passes_over_padding_and_sees_one_bit(make_trainer: Make) -> None:
    plain = make_trainer("plain").model
    padded = make_trainer("padded", model={"pad_vocab_to_multiple_of": 64}).model
    state = plain.state_dict()
    for name, tensor in padded.state_dict().items():
        tensor[: len(state[name])].copy_(state[name])
    names, tokens = padded.vocabulary_weights, plain.config.num_tokens
    assert sha256_of_weights(padded, names, tokens) == sha256_of_weights(plain, names, tokens)
    before = sha256_of_weights(plain, names, tokens)
    with torch.no_grad():
        plain.model.norm.weight[0] = torch.nextafter(plain.model.norm.weight[0], torch.tensor(9.0))
    assert sha256_of_weights(plain, names, tokens) != before


def test_other_sets_are_validated_beside_the_runs_own(make_trainer: Make, token_windows: Make) -> None:
    """The rows hold what a run whose own set it is would have recorded, and training does not notice."""
    fields = {"eval_strategy": "steps", "eval_steps": 3, "eval_tokens": 640}
    alone = make_trainer("alone", **fields)
    other = make_trainer("other", evaluation=token_windows(seed=9), **fields)
    both = make_trainer("both", eval_sets={"old": token_windows(seed=9)}, **fields)
    logged: list[dict[str, float]] = []
    both.add_callback(
        type("Noted", (TrainerCallback,), {"on_evaluate": lambda *a, metrics, **k: logged.append(metrics)})
    )
    for trainer in (alone, other, both):
        trainer.train()
    mine, theirs, found = (
        [row for row in read_rows(trainer.output_dir / "metrics.jsonl") if "eval_loss" in row]
        for trainer in (alone, other, both)
    )
    keys = ("eval_loss", "bits_per_byte", "eval_tokens")
    for own, old, row in zip(mine, theirs, found, strict=True):
        assert {key: row[key] for key in keys} == {key: own[key] for key in keys}
        assert row["eval_sets"] == {"old": {key: old[key] for key in keys}}
    assert own["eval_loss"] != old["eval_loss"]
    assert logged[-1]["eval_old_loss"] == found[-1]["eval_sets"]["old"]["eval_loss"]
    assert [row["loss"] for row in read_rows(both.output_dir / "metrics.jsonl") if "loss" in row] == [
        row["loss"] for row in read_rows(alone.output_dir / "metrics.jsonl") if "loss" in row
    ]
