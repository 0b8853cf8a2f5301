"""recipes/sft.py as users launch it, and the chat model that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from hf_tinylm.cli import main as cli
from hf_tinylm.config import load_config
from hf_tinylm.export.gguf_tokenizer import read_tokenizer_section
from hf_tinylm.files import bundled
from hf_tinylm.modeling.factory import load_model
from hf_tinylm.tokenization.load import load_tokenizer
from hf_tinylm.training.metrics import read_rows

RECIPE = str(bundled("recipes", "sft.py"))
THREE_TURNS = [
    *[{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am Wren."}],
    *[{"role": "user", "content": "  Are you\n\nsure, 안녕?"}, {"role": "assistant", "content": "Yes, I'm sure."}],
    {"role": "user", "content": "Tell me more."},
]


@pytest.fixture(scope="module")
def run(chat_settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("run") / "chat"
    done = launch([sys.executable, RECIPE, "--config", str(chat_settings), "--output_dir", str(folder)])
    assert done.returncode == 0, done.stderr
    assert " of 40 rows (1 passes)" in done.stdout
    return folder


def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=170, check=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_run_learns_and_says_what_it_counted(run: Path) -> None:
    rows = read_rows(run / "metrics.jsonl")
    evaluations = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert evaluations[-1] < evaluations[0]
    identity = read(run / "run.json")["identity"]
    assert identity["data"]["assistant_only_loss"] is True
    assert {"tokenizer_sha256", "conversations_sha256", "test_conversations_sha256"} <= identity["data"].keys()
    done = read(run / "DONE.json")
    assert done["supervised_tokens"] == identity["training"]["train_tokens"]
    assert done["supervised_tokens"] == [row for row in rows if "loss" in row][-1]["supervised_tokens"]
    card = (run / "final" / "README.md").read_text()
    assert "conversational" in card
    assert "| persona |" in card


def test_the_chat_model_ends_at_im_end_everywhere_and_carries_its_template(run: Path) -> None:
    final = run / "final"
    assert read(final / "config.json")["eos_token_id"] == 2
    assert read(final / "generation_config.json")["eos_token_id"] == [2, 0]
    assert read(final / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
    template = (final / "chat_template.jinja").read_text(encoding="utf-8")
    assert template == bundled("tokenizer", "chat_template.jinja").read_text(encoding="utf-8")
    section = read_tokenizer_section(final, read(final / "config.json"))
    assert (section.eos_token_id, section.eot_token_id, section.end_token_ids) == (2, 2, frozenset({0, 2}))
    assert section.chat_template is not None
    assert "generation %}" not in section.chat_template
    assert load_model(final).config.num_tokens == 512


def test_llamacpp_evaluates_the_ids_of_the_chat_template_for_three_turns(run: Path) -> None:
    from hf_tinylm.export.llamacpp import LlamaCppServer

    tokenizer = load_tokenizer(str(run / "final"))
    ids = tokenizer.apply_chat_template(THREE_TURNS, add_generation_prompt=True, return_dict=False)
    with LlamaCppServer(run / "chat-F16.gguf") as server:
        rendered = server.apply_chat_template(THREE_TURNS, add_generation_prompt=True)
        assert server.tokenize([rendered], parse_special=True) == [ids]
        assert server.end_of_generation_ids() >= {0, 2}
        answer = server._post(  # the route that chat clients use counts what it evaluates
            "/v1/chat/completions", {"messages": THREE_TURNS, "max_tokens": 1, "temperature": 0}
        )
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_masks_are_shown_in_colour_or_between_brackets(
    chat_settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_tinylm.data.inspect_chat import chat_inspection_lines

    assert cli(["inspect", "--config", str(chat_settings), "--json", "--windows", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["windows"]) == 2
    spans = found["windows"][0][0]["spans"]
    supervised = [span["text"] for span in spans if span["supervised"]]
    assert all(text.endswith("<|im_end|>") and "<|im_start|>" not in text for text in supervised)
    assert any(span["text"].endswith("<|im_start|>assistant\n") for span in spans if not span["supervised"])
    found["windows"][0][0]["spans"].append({"text": "\x1b[2Jevil", "supervised": False})
    coloured = "\n".join(chat_inspection_lines(found, colour=True))
    assert f"\x1b[32m{supervised[0]}\x1b[0m" in coloured
    assert "\x1b[2J" not in coloured
    assert f"⟦{supervised[0]}⟧" in "\n".join(chat_inspection_lines(found, colour=False))
    everything = yaml.safe_load(chat_settings.read_text())
    everything["data"]["assistant_only_loss"] = False
    (tmp_path / "everything.yaml").write_text(yaml.safe_dump(everything))
    assert cli(["inspect", "--config", str(tmp_path / "everything.yaml"), "--windows", "1"]) == 0
    assert "<|im_start|>⟦user\n" in capsys.readouterr().out
    for wrong in (["inspect"], ["inspect", "shards", "--config", "x"]):
        assert cli(wrong) == 2


def test_a_second_start_is_refused_until_the_chat_model_is_exported(
    chat_settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_tinylm.errors import ContractError
    from hf_tinylm.export import hf

    recipe, add_gguf, told = recipe_main(), hf.add_gguf, []
    command = [
        "--config",
        str(chat_settings),
        "--output_dir",
        str(tmp_path / "run"),
        "--resume_from_checkpoint",
        "auto",
    ]
    command += ["--gguf", "[]", "--epochs", "1", "--eval_steps", "null"]

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(hf, "add_gguf", add_gguf)
        with pytest.raises(ContractError, match="is being written by process"):
            recipe(command)
        told.append("refused")
        return add_gguf(*arguments)

    monkeypatch.setattr(hf, "add_gguf", meanwhile)
    assert recipe(command) == 0
    assert told == ["refused"]
    with pytest.raises(ContractError, match="finished run"):
        recipe(command)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--init_from", "missing/folder/somewhere"], "missing/folder/somewhere is no model folder"),
        (["--init_from", "null"], "init_from is missing"),
        (["--conversations", "[{name: a, path: missing.jsonl}]"], "missing.jsonl does not exist"),
        (["--conversations", "[]"], "data.conversations is empty"),
        (["--sequence_length", "256"], "sequence_length=256 is more than the 128 tokens"),
        (["--sequence_length", "16", "--global_batch_tokens", "1024"], "(elsewhere called max_length)"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    chat_settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    from hf_tinylm.errors import exit_with_error_line

    command = ["--config", str(chat_settings), "--output_dir", str(tmp_path / "run"), *arguments]
    assert exit_with_error_line(lambda: recipe_main()(command)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert told in errors[0]
    assert not (tmp_path / "run").exists()


def recipe_main() -> Callable[[list[str]], int]:
    import runpy

    main: Callable[[list[str]], int] = runpy.run_path(RECIPE)["main"]
    return main


def test_a_model_whose_tokenizer_has_no_control_tokens_is_refused(
    chat_settings: Path, chat_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from hf_tinylm.errors import exit_with_error_line

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))).save_pretrained(tmp_path / "bare")
    command = ["--config", str(chat_settings), "--output_dir", str(tmp_path / "run")]
    assert exit_with_error_line(lambda: recipe_main()([*command, "--tokenizer_path", str(tmp_path / "bare")])) == 2
    assert "has no special token <|im_start|> and <|im_end|>" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one(run: Path, chat_settings: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    two = tmp_path / "two"
    done = launch([*torchrun, RECIPE, "--config", str(chat_settings), "--output_dir", str(two), "--gguf", "[]"])
    assert done.returncode == 0, done.stderr[-3000:]
    for first, second in zip(read_rows(run / "metrics.jsonl"), read_rows(two / "metrics.jsonl"), strict=True):
        assert first.get("supervised_tokens") == second.get("supervised_tokens")
        key = "loss" if "loss" in first else "eval_loss"
        assert first[key] == pytest.approx(second[key], abs=2e-5)
    one, other = (load_file(folder / "final" / "model.safetensors") for folder in (run, two))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-3


@pytest.mark.slow
def test_smoltalk_and_the_base_model_come_from_the_hub_by_name(
    hub: Any, chat_base: Path, chat_settings: Path, tmp_path: Path
) -> None:
    import datasets

    talk = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]
    rows = {"messages": [talk] * 24 + [[{"role": "system", "content": "Be brief."}, *talk]], "source": ["smol"] * 25}
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "data" / f"{split}-00000-of-00001.parquet"))
    hub.add("HuggingFaceTB/smol-smoltalk", tmp_path / "data")
    hub.add("lab/base", *sorted(chat_base.iterdir()), kind="models")
    sources = "[{name: smoltalk, path: HuggingFaceTB/smol-smoltalk, split: %s}]"
    done = hub.run(
        *(RECIPE, "--config", str(chat_settings), "--output_dir", str(tmp_path / "run"), "--init_from", "lab/base"),
        *("--conversations", sources % "train", "--test_conversations", sources % "test", "--gguf", "[]"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "smoltalk: 25 of 25 rows" in done.stdout
    config = read(tmp_path / "run" / "run.json")["config"]
    assert (config["training"]["init_from"], read(tmp_path / "run" / "DONE.json")["updates"]) == ("lab/base", 2)
    assert "base_model: lab/base" in (tmp_path / "run" / "final" / "README.md").read_text()
    refused = hub.run(
        RECIPE, "--config", str(chat_settings), "--output_dir", str(tmp_path / "x"), "--init_from", "lab/none"
    )
    assert refused.returncode == 2
    assert "lab/none is neither a folder here nor a model that the Hub gave" in refused.stderr


def test_the_first_update_has_the_loss_of_trls_trainer(
    chat_settings: Path, chat_base: Path, tmp_path: Path, byte_chat_tokenizer: Any
) -> None:
    """The same rows, rates and masks; TRL renders them by itself from the template with its generation markers."""
    trl = pytest.importorskip("trl", reason="the oracle is optional: pip install trl")
    import datasets

    from hf_tinylm.data.conversations import open_conversations
    from hf_tinylm.modeling.stock import stock_model
    from hf_tinylm.tokenization.chat import chat_tokenizer

    tokenizer = chat_tokenizer(str(chat_base))
    config = load_config(str(chat_settings), ["--packing", "false"])
    chats = open_conversations(config, tokenizer).train
    model = load_model(chat_base)
    batch = chats.batch(range(8))
    expected = model(**batch).loss.item()
    lines = Path(config.data.conversations[0].path).read_text(encoding="utf-8").splitlines()
    numbers = [chats.describe(k)["conversations"][0].removeprefix("persona conversation ") for k in range(8)]
    chosen = [json.loads(lines[int(number) - 1])["messages"] for number in numbers]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), assistant_only_loss=True, max_length=128, packing=False, use_cpu=True, bf16=False,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, learning_rate=3e-3, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        stock_model(model), args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{"messages": messages} for messages in chosen]),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-4)
