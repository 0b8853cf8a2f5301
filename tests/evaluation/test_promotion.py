"""The pointer moves to a candidate that is better by the stated rules, and to no other."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError, DataError, TokenizerError, VerificationError
from hf_tinylm.evaluation import promotion
from hf_tinylm.evaluation.compare import paired_bootstrap
from hf_tinylm.evaluation.promotion import TEXT, Rules, Scores, compare_scores, load_held_out, score
from hf_tinylm.modeling.factory import load_model, new_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.chat import ChatRenderer, chat_tokenizer, end_ids
from hf_tinylm.tokenization.load import load_tokenizer

CHATS = [
    [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}],
    [
        {"role": "system", "content": "Be kind."},
        *({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))),
    ],
    [{"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "Two\n"), ("user", "3"), ("assistant", "4"))],
]


@pytest.fixture(scope="module")
def work(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models `fresh` and `taught` (the second has learned the held-out chats) and `gate.yaml`."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    values = yaml.safe_load(tiny_config.read_text())
    values["data"]["sequence_length"] = 64
    values["data"]["test_conversations"] = [{"name": "chats", "path": str(folder / "chats.jsonl")}]
    (folder / "gate.yaml").write_text(yaml.safe_dump(values))
    config = load_config(str(folder / "gate.yaml"))
    tokenizer = chat_tokenizer(str(config.tokenizer.tokenizer_path))
    model = new_model(config.model, 512, 64, 0, eos_token_id=end_ids(tokenizer), pad_token_id=tokenizer.pad_token_id)
    save_stock_model(model, folder / "fresh", tokenizer, replace=False)
    renderer, optimizer = ChatRenderer(tokenizer), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        for chat in CHATS:
            ids = torch.from_numpy(renderer.render(chat).ids.astype(np.int64))[None]
            logits = model(ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_stock_model(model, folder / "taught", tokenizer, replace=False)
    return folder


@pytest.fixture
def pointer(work: Path, tmp_path: Path) -> Path:
    """A link to the fresh model."""
    link = tmp_path / "current"
    link.symlink_to(work / "fresh")
    return link


def arguments(work: Path, candidate: str, pointer: Path, *more: str) -> list[str]:
    gate = ["promote", str(work / candidate), "--over", str(pointer), "--config", str(work / "gate.yaml")]
    return [*gate, "--max_new_tokens", "16", *more]


def test_losses_of_conversations_are_those_of_transformers_on_its_own_mask(work: Path) -> None:
    held_out = load_held_out(load_config(str(work / "gate.yaml")), work / "taught", work / "fresh")
    nats, targets = promotion.conversation_losses(load_model(work / "taught"), held_out.conversations["chats"])
    stock = LlamaForCausalLM.from_pretrained(work / "taught", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(work / "taught")
    for i, chat in enumerate(CHATS):
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([found["input_ids"]]), torch.tensor(found["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            logprobs = stock(ids).logits[0, :-1].log_softmax(-1)
        supervised = -logprobs[torch.arange(ids.shape[1] - 1), ids[0, 1:]][mask[1:]]
        assert nats[i] == pytest.approx(float(supervised.sum()), abs=1e-4)
        assert targets[i] == len(supervised)


def test_a_better_candidate_is_pointed_at_and_the_table_says_why(
    work: Path, pointer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(work, "taught", pointer, "--text_tolerance", "20", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    chats, text = report["sets"]
    assert (report["promoted"], chats["name"], text["name"]) == (True, "chats", "base text")
    assert chats["current"] > 5 > 0.5 > chats["candidate"]
    assert chats["interval"][0] <= chats["difference"] <= chats["interval"][1] < 0
    assert report["stop"]["candidate"] == 1.0
    assert report["stop"]["items"] == 3
    assert not os.path.isabs(os.readlink(pointer))
    assert pointer.resolve() == work / "taught"
    assert load_model(pointer).config.vocab_size == 512
    assert main(arguments(work, "taught", pointer)) == 2
    assert "points at" in capsys.readouterr().err


def test_a_worse_candidate_changes_nothing_and_ends_with_1(
    work: Path, pointer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer.unlink()
    pointer.symlink_to(work / "taught")
    assert main(arguments(work, "fresh", pointer)) == 1
    shown = capsys.readouterr()
    error = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "stays as it is: chats: the loss may be +" in error[0]
    assert "on no set of conversations is the candidate better" in error[0]
    assert "0.0% of replies end by themselves; 95.0% is needed" in error[0]
    assert "chats" in shown.out
    assert "at most 0.05: FAILS" in shown.out
    assert "Who are you?" in shown.out
    assert os.readlink(pointer) == str(work / "taught")
    assert main(arguments(work, "fresh", pointer, "--json")) == 1
    assert json.loads(capsys.readouterr().out)["promoted"] is False


def test_a_model_that_forgets_the_base_text_is_refused(
    work: Path, pointer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(work, "taught", pointer)) == 1
    assert "base text: the loss may be +" in capsys.readouterr().err
    assert pointer.resolve() == work / "fresh"


def test_another_tokenizer_is_refused(work: Path, pointer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(work / "taught", other)
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = load_config(str(work / "gate.yaml"))
    with pytest.raises(TokenizerError, match=r"other has another tokenizer than .*fresh"):
        promotion.promote(other, pointer, config, Rules())
    pointer.unlink()
    pointer.symlink_to(other)
    shutil.copytree(other, tmp_path / "another")
    with pytest.raises(TokenizerError, match="shards was written with another tokenizer"):
        promotion.promote(tmp_path / "another", pointer, config, Rules())


def test_a_missing_test_set_is_refused(work: Path, pointer: Path) -> None:
    path = str(work / "gate.yaml")
    no_chats, no_text, no_file = load_config(path), load_config(path), load_config(path)
    no_chats.data.test_conversations = []
    no_text.data.shards = None
    no_file.data.test_conversations[0].path = str(work / "absent.jsonl")
    for config, error, reason in (
        (no_chats, ConfigError, "test_conversations is empty"),
        (no_text, ConfigError, "shards is missing"),
        (no_file, DataError, r"absent\.jsonl"),
    ):
        with pytest.raises(error, match=reason):
            promotion.promote(work / "taught", pointer, config, Rules())
    assert pointer.resolve() == work / "fresh"


def test_a_pointer_that_is_no_link_is_refused_with_what_to_type(work: Path, tmp_path: Path) -> None:
    config = load_config(str(work / "gate.yaml"))
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for pointer, reason in (
        (work / "fresh", "is no symbolic link"),
        (tmp_path / "absent", "ln -s FOLDER .*absent"),
        (tmp_path / "dangling", "points at .*gone, which does not exist"),
    ):
        with pytest.raises(ConfigError, match=reason):
            promotion.promote(work / "taught", pointer, config, Rules())


def test_a_pointer_that_was_moved_meanwhile_is_left_alone(
    work: Path, pointer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third").mkdir()

    def move(*given: object) -> dict[str, list[str]]:
        pointer.unlink()
        pointer.symlink_to(tmp_path / "third")
        return {"failures": []}

    monkeypatch.setattr(promotion, "compare_scores", move)
    with pytest.raises(VerificationError, match="was moved while"):
        promotion.promote(work / "taught", pointer, load_config(str(work / "gate.yaml")), Rules(max_new_tokens=4))
    assert pointer.resolve() == tmp_path / "third"


def test_a_damaged_model_is_named(work: Path, pointer: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(work / "taught", tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=r"damaged on chats is not finite"):
        promotion.promote(tmp_path / "damaged", pointer, load_config(str(work / "gate.yaml")), Rules(max_new_tokens=4))


@pytest.fixture
def even() -> Scores:
    """Forty conversations and windows at 2 nats per token, every reply ended."""
    items = (np.full(40, 20.0), np.full(40, 10))
    return Scores({"a": items, "b": items, TEXT: items}, np.ones(40, dtype=bool), ["x"] * 4)


def shifted(scores: Scores, name: str, by: float) -> Scores:
    nats, tokens = scores.losses[name]
    return replace(scores, losses={**scores.losses, name: (nats + by * tokens, tokens)})


@pytest.mark.parametrize(
    ("changes", "ended", "failure"),
    [
        ([("a", -0.01)], 40, None),
        ([("a", -0.01), ("b", 0.04)], 40, None),
        ([("a", -0.01), (TEXT, 0.09)], 38, None),
        ([("a", -0.01), ("b", 0.06)], 40, "b: the loss may be +0.0600 worse; at most +0.0500 is allowed"),
        ([("a", -0.01), (TEXT, 0.11)], 40, "base text: the loss may be +0.1100 worse; at most +0.1000 is allowed"),
        ([("a", -0.01)], 37, "92.5% of replies end by themselves; 95.0% is needed"),
        ([], 40, "on no set of conversations is the candidate better beyond chance"),
        ([(TEXT, -1.0)], 40, "on no set of conversations is the candidate better beyond chance"),
    ],
)
def test_each_rule_decides(even: Scores, changes: list[tuple[str, float]], ended: int, failure: str | None) -> None:
    candidate = replace(even, ended=np.arange(40) < ended)
    for name, by in changes:
        candidate = shifted(candidate, name, by)
    assert compare_scores(even, candidate, Rules())["failures"] == ([] if failure is None else [failure])


def test_the_interval_is_that_of_paired_differences() -> None:
    generator = np.random.default_rng(3)
    sizes, common = np.full(400, 10), generator.normal(20, 8, 400)
    a, b = (common, sizes), (common + generator.normal(1, 2, 400), sizes)
    low, high = paired_bootstrap(a, b, seed=0)
    difference = (b[0] - a[0]) / 10
    half = 1.96 * difference.std(ddof=1) / 20  # the normal approximation
    assert low == pytest.approx(difference.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(difference.mean() + half, abs=0.1 * half)
    assert paired_bootstrap(a, b, seed=0) == (low, high)
    assert paired_bootstrap(a, b, seed=1) != (low, high)
    uneven = (np.array([1.0, 30.0]), np.array([1, 10]))
    assert paired_bootstrap(uneven, uneven, seed=0) == (0.0, 0.0)


def test_replies_are_greedy_and_stop_prompts_end_before_the_last_reply(work: Path) -> None:
    held_out = load_held_out(load_config(str(work / "gate.yaml")), work / "taught", work / "fresh")
    model, tokenizer = load_model(work / "taught"), load_tokenizer(work / "taught")
    prompts = promotion._prompts(held_out.conversations["chats"], 64)
    for prompt, chat in zip(prompts, CHATS, strict=True):
        wanted = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert prompt == list(wanted)
    rules = Rules(max_new_tokens=16)
    first, second = score(model, tokenizer, held_out, rules), score(model, tokenizer, held_out, rules)
    assert first.replies == second.replies
    assert first.ended.tolist() == [True, True, True]
