"""The commands, called as the console script calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from hf_tinylm.cli import build_parser, main
from hf_tinylm.demo import chat_failures, run_demo, summary_lines
from hf_tinylm.errors import ConfigError

COMMANDS = [
    *("tokenizer train", "tokenizer audit", "prepare", "inspect", "eval", "sample", "export", "verify-gguf", "where"),
    *("plan", "find-batch", "sweep", "demo", "persona check", "chat", "serve", "promote", "preflight"),
    *("tail", "report", "diagnose", "verify-run"),
]


@pytest.fixture(scope="module")
def trained(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny configuration."""
    from runpy import run_path

    from hf_tinylm.files import bundled

    folder = tmp_path_factory.mktemp("trained") / "run"
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    assert recipe(["--config", str(tiny_config), "--output_dir", str(folder), "--gguf", "f32"]) == 0
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args([*command.split(), "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"example: hf-tinylm {command}" in shown or "example: accelerate launch" in shown


def test_an_unknown_command_and_an_unknown_option_end_with_2() -> None:
    for arguments in (["trian"], ["where", "recipes", "--loud"], []):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_tokenizer_train_prepare_and_inspect(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, shards = str(tmp_path / "tokenizer"), str(tmp_path / "shards")
    shared = ["--config", str(tiny_config), "--tokenizer_path", tokenizer]
    assert main(["tokenizer", "train", *shared, "--vocab_size", "400"]) == 0
    assert "tokenizer of 400 tokens" in capsys.readouterr().out
    assert main(["prepare", *shared, "--shards", shards, "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["vocab_size"] == 400
    assert main(["inspect", shards, "--tokenizer", tokenizer, "--json", "--windows", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    needed = "ids documents vocab_size dtype tokenizer_sha256 separator sources duplicates dropped"
    assert set(needed.split()) <= set(found)
    assert len(found["windows"]) == 2
    assert all(window["input"][5:40] in window["target"] for window in found["windows"])
    assert main(["inspect", shards, "--tokenizer", tokenizer]) == 0
    assert "  prose " in capsys.readouterr().out
    assert main(["inspect", shards, "--tokenizer", str(tiny_config.parent / "tokenizer")]) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_tokenizer_audit_reports_bytes_per_token(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = str(tiny_config.parent / "tokenizer")
    assert main(["tokenizer", "audit", tokenizer, "--config", str(tiny_config), "--compare", tokenizer, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["compare"][tokenizer]["bytes_per_token"] == report["bytes_per_token"] > 1
    assert main(["tokenizer", "audit", tokenizer, "--config", str(tiny_config)]) == 0
    assert "every byte value and every string comes back unchanged" in capsys.readouterr().out


def test_eval_gives_the_loss_of_the_run_beside_baselines(
    tiny_config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained / "final"), "--config", str(tiny_config), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= {"model", "suite", "items", "results"}
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval_loss" in row][-1]
    assert report["results"]["loss"]["value"] == pytest.approx(last["eval_loss"], abs=1e-5)
    assert report["results"]["bits_per_byte"]["value"] == pytest.approx(last["bits_per_byte"], abs=1e-5)
    assert report["results"]["kneser_ney_bigram_loss"]["value"] < report["results"]["unigram_loss"]["value"]
    assert main(["eval", str(trained / "final"), "--config", str(tiny_config)]) == 0
    assert "kneser_ney_bigram_bits_per_byte" in capsys.readouterr().out


HELLASWAG_ROWS = [
    {
        **{"activity_label": "Walk", "ctx_a": "Emma went to the", "ctx_b": "", "label": str(n % 4)},
        "endings": ["park.", "moon on a ladder.", "house of her friend.", f"{n} Zürich."],
    }
    for n in range(12)
]


def test_eval_of_a_suite_is_printed_saved_and_put_into_the_card(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, HELLASWAG_ROWS)))
    command = ["eval", str(trained / "final"), "--suite", "hellaswag", "--data", str(rows)]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["suite"], report["items"]) == ("hellaswag", 12)
    assert set(report["results"]) == {
        *("accuracy_sum", "accuracy_per_token", "accuracy_per_character", "accuracy_per_byte", "chance")
    }
    assert all({"value", "stderr", "rule", "interval"} <= set(found) for found in report["results"].values())
    done = json.loads((trained / "DONE.json").read_text())
    assert report["engine"]["model_sha256"] == done["final_weights_sha256"]["model.safetensors"]
    assert report["rule"]["cleanup"] == "wikihow_brackets"
    assert report["versions"]["transformers"]
    assert json.loads((trained / "eval" / "hellaswag.json").read_text()) == report
    assert len((trained / "eval" / "hellaswag.items.jsonl").read_text().splitlines()) == 12
    assert "| hellaswag | 12 | accuracy_sum |" in (trained / "final" / "README.md").read_text()
    checkpoint = trained / "checkpoint-00000002"
    before = sorted(path.name for path in checkpoint.iterdir())
    assert main(["eval", str(checkpoint), *command[2:], "--limit", "3"]) == 0
    assert "hellaswag, 3 items" in capsys.readouterr().out
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    assert (trained / "eval" / checkpoint.name / "hellaswag.json").is_file()


def test_eval_of_raw_text_and_the_comparison_of_two_models_on_it(
    tiny_config: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    texts = ["Emma was not sorry to go.", "It was a long way.", "Mr. Knightley smiled at her."]
    text.write_text("\n".join(json.dumps({"text": t, "source": t[:4]}) for t in texts))
    command = ["--text", str(text), "--config", str(tiny_config)]
    for name in ("checkpoint-00000002", "final"):
        out = ["--output_dir", str(tmp_path / name)]
        assert main(["eval", str(trained / name), *command, *out, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert {"loss/Emma", "loss/It w", "bits_per_byte/Mr. "} <= set(report["results"])
        assert report["results"]["kneser_ney_bigram_bits_per_byte"]["value"] > 0
    saved = [str(tmp_path / name / "text-text.jsonl.json") for name in ("checkpoint-00000002", "final")]
    assert main(["eval", "--compare", *saved, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["results"]) == {"loss", "bits_per_byte"}
    assert found["results"]["loss"]["interval"][0] <= found["results"]["loss"]["difference"]
    models = [str(trained / name) for name in ("checkpoint-00000002", "final")]
    assert main(["eval", "--compare", *models, *command, "--metric", "loss"]) == 0
    assert "loss of B minus A is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give one model, or two things to compare"),
        (["MODEL", "--compare", "a.json", "b.json"], "Give one model, or two things to compare"),
        (["MODEL"], "Say what to score: --suite NAME, --text FILE, or --config NAME"),
        (["MODEL", "--suite", "hellaswag", "--text", "x"], "Say what to score"),
        (["MODEL", "--suite", "helaswag"], "There is no suite helaswag"),
        (["MODEL", "--suite", "hellaswag"], "could not be loaded"),
        (["MODEL", "--suite", "hellaswag", "--data", "missing.jsonl"], "missing.jsonl"),
        (["MODEL", "--suite", "hellaswag", "--data", "EMPTY"], "holds no item"),
        (["MODEL", "--text", "EMPTY"], "holds no text"),
        (["MODEL", "--text", "missing.txt"], "missing.txt"),
        (["MODEL", "--text", "TEXT", "--window", "4096"], "window=4,096 must be 2 or more and at most 32"),
        (["MODEL", "--text", "TEXT", "--limit", "0"], "must be 1 or more"),
        (["MODEL", "--suite", "piqa", "--stride", "8"], "are for raw text"),
        (["MODEL", "--text", "TEXT", "--data", "x"], "Name the suite"),
        (["MODEL", "--text", "TEXT", "--tokenizer", "TEXT"], "tokenizer"),
        (["--compare", "a.json", "b.json"], "a.json does not exist"),
        (["missing.gguf", "--text", "TEXT"], "missing.gguf"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "text.txt").write_text("Some text.")
    names = {"MODEL": str(trained / "final"), "EMPTY": "empty", "TEXT": "text.txt"}
    assert main(["eval", *(names.get(argument, argument) for argument in arguments)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text.txt"]


def test_sample_is_greedy_at_temperature_zero_and_reads_checkpoints(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "Emma", "--temperature", "0", "--max_new_tokens", "8"]
    texts = []
    for model in (trained / "final", trained / "checkpoint-00000006"):
        assert main(["sample", str(model), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("Emma")


def test_sample_shows_checkpoints_side_by_side_on_a_file_of_prompts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Emma was\nIt is\n")
    models = [str(trained / "checkpoint-00000002"), str(trained / "final")]
    command = ["sample", *models, "--prompts", str(prompts), "--max_new_tokens", "6", "--top_k", "5", "--min_p", "0.01"]
    assert main([*command, "--repetition_penalty", "1.2", "--stop", "~", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["models"] == models
    assert [row["prompt"] for row in report["samples"]] == ["Emma was", "It is"]
    assert report["settings"]["top_k"] == 5
    assert main([*command, "--repetition_penalty", "1.2", "--stop", "~"]) == 0
    shown = "\n\n".join(
        f"=== {row['prompt']}\n"
        + "\n".join(f"--- {m}\n{row['prompt']}{t}" for m, t in zip(models, row["texts"], strict=True))
        for row in report["samples"]
    )
    assert capsys.readouterr().out == shown + "\n"
    assert main([*command, "--prompt", "x"]) == 2
    assert main(["sample", models[0], "--top_k", "-3"]) == 2
    assert "top_k=-3" in capsys.readouterr().err


def test_curves_count_the_tokens_and_flops_of_the_runs_own_rows(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoint-*", "*.gguf", "final"))
    assert main(["eval", "--curves", str(trained), str(tmp_path / "copy"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["curves"]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "loss" in row]
    parameters, palm = 34_976, 12 * 2 * 32 * 32  # 12 x layers x width x T
    assert first["flops"] == 6 * 256 * (6 * parameters + palm)  # the last update computes its masked tail as well
    assert sum(row["flops_per_second"] * row["seconds"] for row in updates) == pytest.approx(first["flops"], rel=1e-3)
    assert first["validation"] == next(row["eval_loss"] for row in reversed(rows) if "eval_loss" in row)
    assert second["reached"]["tokens"] == second["reached"]["baseline_tokens"] == updates[-1]["supervised_tokens"]


def test_export_of_a_checkpoint_equals_the_final_folder(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(trained / "checkpoint-00000006"), "--output_dir", str(tmp_path / "out"), "--gguf", "f32"]
    assert main([*command, "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert not (tmp_path / "out").exists()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gguf"]["f32"]["bytes"] == plan["bytes"]
    assert found["gguf"]["f32"]["path"] == str(tmp_path / "out" / "out-F32.gguf")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (trained / "final" / name).read_bytes()
    assert main(command) == 2
    assert "not empty" in capsys.readouterr().err


def test_verify_gguf_passes_on_the_run_and_fails_on_another_model(
    tiny_config: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = str(trained / "run-F32.gguf")
    assert main(["verify-gguf", gguf, "--against", str(trained / "final"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    needed = "ok token_mismatches strings max_logit_difference greedy_equal template_equal"
    assert set(needed.split()) <= set(report)
    assert report["ok"] is True
    assert main(["export", str(trained / "checkpoint-00000002"), "--output_dir", str(tmp_path / "other")]) == 0
    assert main(["verify-gguf", gguf, "--against", str(tmp_path / "other")]) == 1
    assert "does not match" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["sample", "missing"],
        ["export", "missing", "--output_dir", "out"],
        ["eval", "missing", "--config", "demo"],
        ["inspect", "missing"],
        ["inspect", "missing", "--find", "5", "--plot", "missing.png"],
        ["verify-gguf", "missing.gguf", "--against", "missing"],
        ["persona", "check", "missing"],
        ["chat", "missing.gguf"],
        ["serve", "missing.gguf"],
        ["promote", "new", "--over", "missing", "--config", "demo"],
        ["prepare", "--config", "missing"],
        ["tokenizer", "audit", "missing/tokenizer/folder", "--config", "demo"],
    ],
)
def test_a_missing_path_is_one_line_that_names_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert "missing" in error[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["tokenizer", "train"], ["prepare"]])
@pytest.mark.parametrize("content", ["", " \n\n \t\n"])
def test_an_empty_corpus_is_one_line_and_exit_code_2(
    tiny_config: Path, tmp_path: Path, command: list[str], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text(content)
    config = yaml.safe_load(tiny_config.read_text())
    config["data"]["sources"] = [{"name": "nothing", "path": str(tmp_path / "empty.txt")}]
    config["data"]["shards"] = str(tmp_path / "shards")
    if command == ["tokenizer", "train"]:
        config["tokenizer"]["tokenizer_path"] = str(tmp_path / "tokenizer")
    (tmp_path / "empty.yaml").write_text(yaml.safe_dump(config))
    assert main([*command, "--config", str(tmp_path / "empty.yaml")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "nothing" in errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "empty.yaml"]


def test_the_demo_says_what_its_chat_model_has_not_learned() -> None:
    good = {"loss": 2.0, "base_loss": 4.0, "asked_for_its_name": 10, "replies": 100}
    good |= {
        f"{what}_{engine}": n for what, n in (("named", 8), ("ended", 95)) for engine in ("transformers", "llamacpp")
    }
    assert chat_failures(good) == []
    assert chat_failures({**good, "loss": 2.1}) == ["the test loss fell from 4.0000 to 2.1000, by less than half"]
    assert chat_failures({**good, "named_llamacpp": 7}) == ["7 of 10 held-out questions got its name in llamacpp"]
    assert chat_failures({**good, "ended_transformers": 94}) == [
        "94 of 100 replies ended by themselves in transformers"
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_runs_end_to_end_when_scaled_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too short to beat the bigram, so the exit code says 1; every stage runs, and llama.cpp agrees."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_tinylm.demo.REPLIES", 10)
    monkeypatch.setattr("hf_tinylm.demo.REPLY_TOKENS", 8)
    overrides = ["--train_tokens", "40_960", "--global_batch_tokens", "4096", "--warmup_steps", "2"]
    overrides += [
        "--hidden_size",
        "64",
        "--intermediate_size",
        "128",
        "--num_hidden_layers",
        "2",
        "--vocab_size",
        "512",
    ]
    assert run_demo(overrides) == 1
    summary = json.loads((tmp_path / "runs" / "demo" / "pretrain" / "summary.json").read_text())
    assert summary["continuations_equal"] is True
    assert summary["loss"] > summary["kneser_ney_bigram_loss"]
    assert summary["first_20_losses"]["min"] <= summary["first_20_losses"]["mean"] <= summary["first_20_losses"]["max"]
    chat = summary["chat"]
    assert chat["loss"] < chat["base_loss"]
    assert (chat["asked_for_its_name"], chat["asked_for_something_else"], chat["replies"]) == (13, 23, 10)
    assert chat["answer_transformers"] == chat["answer_llamacpp"]
    shown = capsys.readouterr().out
    assert all(line in shown for line in summary_lines(summary) if line)
    assert run_demo(overrides) == 1  # nothing is trained again
    with pytest.raises(ConfigError, match=r"other settings \(training\.learning_rate: 0\.006 -> 0\.001\)"):
        run_demo([*overrides, "--learning_rate", "1e-3"])
