"""The recipes as users launch them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from safetensors.torch import load_file

from hf_tinylm.errors import ContractError
from hf_tinylm.files import bundled

PRETRAIN = str(bundled("recipes", "pretrain.py"))
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--quiet",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
]
LAUNCH += ["--dynamo_backend", "no"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        variables.pop(name, None)
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_pretrain_writes_every_file_of_a_run_and_its_export(tiny_config: Path, tmp_path: Path) -> None:
    done = launch(
        [
            *(*LAUNCH, "--num_processes", "1", PRETRAIN, "--config", str(tiny_config)),
            *("--output_dir", str(tmp_path / "run"), "--gguf", "f32", "f16", "--verify", "true", "--run_name", "tiny"),
        ]
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    found = {path.name for path in run.iterdir()}
    assert found == {
        *("run.json", "metrics.jsonl", "events.jsonl", "DONE.json", "final", "tiny-F32.gguf", "tiny-F16.gguf"),
        *("Modelfile", "report.html", "hardware.jsonl"),
        *("checkpoint-00000002", "checkpoint-00000004", "checkpoint-00000006"),
    }
    assert {path.name for path in (run / "final").iterdir()} >= {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "README.md",
    }
    finished = json.loads((run / "DONE.json").read_text())
    assert (finished["updates"], finished["supervised_tokens"]) == (6, 6 * 256 - 51)
    last = rows_of(run)[-1]
    assert finished["last_evaluation"] == last
    assert last["eval_loss_by_source"]["prose"] == pytest.approx(last["eval_loss"], abs=1e-6)
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows_of(run) if "eval_loss" in row] == [3, 6]
    assert done.stdout.count("with 0 mismatches") == 2
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[0] == "started"
    assert events[-1] == "finished"
    card = (run / "final" / "README.md").read_text()
    assert "| prose |" in card
    assert "1,485" in card


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_the_run_of_one(tiny_config: Path, tmp_path: Path, launcher: str) -> None:
    """20 updates at learning rate 1e-4: one process x 4 micro-batches and two x 2 agree to 5e-6 in every weight."""
    settings = ["--config", str(tiny_config), "--learning_rate", "1e-4", "--train_tokens", str(20 * 256 - 100)]
    two = (
        TORCHRUN
        if launcher == "torchrun"
        else [*LAUNCH, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    )
    one = launch([sys.executable, PRETRAIN, *settings, "--output_dir", str(tmp_path / "one")])
    both = launch([*two, PRETRAIN, *settings, "--output_dir", str(tmp_path / "two")], ACCELERATE_USE_CPU="true")
    assert one.returncode == 0, one.stderr
    assert both.returncode == 0, both.stderr
    weights = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "two")]
    start = load_file(tmp_path / "one" / "checkpoint-00000016" / "model.safetensors")
    assert max(float((weights[0][name] - start[name]).abs().max()) for name in start) > 1e-5
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in start) < 5e-6
    assert json.loads((tmp_path / "two" / "run.json").read_text())["execution"]["processes"] == 2
    for first, second in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert first.get("supervised_tokens") == second.get("supervised_tokens")
        key = "loss" if "loss" in first else "eval_loss"
        assert first[key] == pytest.approx(second[key], abs=2e-6)
    assert (tmp_path / "two" / "checkpoint-00000020" / "rng-00001.safetensors").is_file()


def test_an_interrupted_run_is_resumed_by_the_recipe(tiny_config: Path, tmp_path: Path) -> None:
    settings = [sys.executable, PRETRAIN, "--config", str(tiny_config)]
    whole = launch([*settings, "--output_dir", str(tmp_path / "whole")])
    assert whole.returncode == 0, whole.stderr
    again = launch([*settings, "--output_dir", str(tmp_path / "whole"), "--resume_from_checkpoint", "auto"])
    assert again.returncode == 2
    assert "finished run" in again.stderr
    for name in ("DONE.json", "checkpoint-00000006/manifest.json"):
        (tmp_path / "whole" / name).unlink()
    staged = ["--stage_dir", str(tmp_path / "near")]  # where files are read from is no part of what the run is
    resumed = launch([*settings, "--output_dir", str(tmp_path / "whole"), "--resume_from_checkpoint", "auto", *staged])
    assert resumed.returncode == 0, resumed.stderr
    assert {path.name.split("-")[0] for path in (tmp_path / "near").iterdir()} == {"shards", "resume"}
    finished = json.loads((tmp_path / "whole" / "DONE.json").read_text())
    assert (finished["updates"], finished["last_checkpoint"]) == (6, "checkpoint-00000006")


def test_nobody_else_starts_in_the_folder_while_a_finished_run_is_exported(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start is made in the middle of the export, and once more when the export of the first has failed."""
    from hf_tinylm.export import hf

    recipe, add_gguf, told = run_path(PRETRAIN)["main"], hf.add_gguf, []
    settings = ["--config", str(tiny_config), "--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", "auto"]

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(hf, "add_gguf", add_gguf)
        assert not (tmp_path / "run" / "DONE.json").exists()
        with pytest.raises(ContractError, match=rf"is being written by process {os.getpid()} on"):
            recipe(settings)
        told.append("refused")
        raise OSError("the disk is full")

    monkeypatch.setattr(hf, "add_gguf", interrupted)
    with pytest.raises(OSError, match="the disk is full"):
        recipe(settings)
    assert told == ["refused"]
    assert recipe(settings) == 0  # the failed one gave the folder back
    assert (tmp_path / "run" / "DONE.json").is_file()
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rat", "1e-3"], "Did you mean learning_rate?"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--global_batch_tokens", "352"], "is not a multiple of the 64 tokens of one micro-step"),
        (["--global_batch_tokens", "250"], "is not a multiple of sequence_length=32"),
        (["--shards", "missing/shards"], "missing/shards"),
        (["--tokenizer_path", "missing/tokenizer/folder"], "missing/tokenizer/folder"),
        (["--warmup_steps", "6"], "leaves no update of this run"),
        (
            ["--sequence_length", "100000", "--global_batch_tokens", "100000", "--per_device_train_batch_size", "1"],
            "holds a window",
        ),
        (["--config", "missing.yaml"], "missing.yaml does not exist"),
        (["--output_dir", "USED"], "not empty"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    tiny_config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    arguments = [str(tmp_path / "used") if argument == "USED" else argument for argument in arguments]
    command = [
        sys.executable,
        PRETRAIN,
        "--config",
        str(tiny_config),
        "--output_dir",
        str(tmp_path / "run"),
        *arguments,
    ]
    done = launch(command)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_learning_rate_in_scientific_notation_reaches_the_run(tiny_config: Path, tmp_path: Path) -> None:
    command = [sys.executable, PRETRAIN, "--config", str(tiny_config), "--output_dir", str(tmp_path / "run")]
    done = launch([*command, "--learning_rate", "6e-4", "--train_tokens", "768"])
    assert done.returncode == 0, done.stderr
    identity = json.loads((tmp_path / "run" / "run.json").read_text())["identity"]
    assert identity["training"]["learning_rate"] == 6e-4


def test_the_record_of_a_run_starts_it_again_to_the_same_bits(tiny_config: Path, tmp_path: Path) -> None:
    first = [sys.executable, PRETRAIN, "--config", str(tiny_config), "--output_dir", str(tmp_path / "first")]
    done = launch([*first, "--learning_rate", "7e-4", "--note", "does it repeat?"])
    assert done.returncode == 0, done.stderr
    record = str(tmp_path / "first" / "run.json")
    done = launch([sys.executable, PRETRAIN, "--config", record, "--output_dir", str(tmp_path / "again")])
    assert done.returncode == 0, done.stderr
    names = ("final/model.safetensors", "checkpoint-00000006/optimizer.safetensors")
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert json.loads((tmp_path / "again" / "run.json").read_text())["facts"]["note"] == "does it repeat?"


def test_the_library_example_of_the_readme_runs_as_it_is_written(tiny_config: Path, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    code = next(block for block in readme.split("```python")[1:] if "LMTrainer(" in block).split("```")[0]
    replaced = {"runs/demo/shards": str(tiny_config.parent / "shards"), "runs/mine": str(tmp_path / "mine")}
    replaced |= {'load_config("demo")': f"load_config({str(tiny_config)!r})", "1_000_000": "512", "8_192": "256"}
    replaced |= {"sequence_length=256": "sequence_length=32", "vocab_size, 256,": "vocab_size, 32,"}
    for old, new in replaced.items():
        assert old in code, old
        code = code.replace(old, new)
    done = launch([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert len(rows_of(tmp_path / "mine")) == 2


def test_a_damaged_shard_stops_training_with_its_name(tiny_config: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_config.parent / "shards", tmp_path / "shards")
    shard = next((tmp_path / "shards" / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    command = [sys.executable, PRETRAIN, "--config", str(tiny_config), "--output_dir", str(tmp_path / "run")]
    done = launch([*command, "--shards", str(tmp_path / "shards")])
    assert done.returncode == 2
    assert shard.name in done.stderr


def test_bundled_recipes_are_where_the_command_says() -> None:
    done = launch([sys.executable, "-m", "hf_tinylm.cli", "where", "recipes"])
    assert (Path(done.stdout.strip()) / "pretrain.py").is_file()


def test_torch_is_not_needed_to_learn_of_a_typo() -> None:
    """A key is checked before the heavy imports, so the answer is instant."""
    program = (
        "import runpy, sys\n"
        "sys.argv = ['pretrain.py', '--config', 'demo', '--learning_rat', '1']\n"
        "try:\n"
        f"    runpy.run_path({PRETRAIN!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules)\n"
    )
    done = launch([sys.executable, "-c", program])
    assert done.stdout.split() == ["2", "False"], done.stderr
