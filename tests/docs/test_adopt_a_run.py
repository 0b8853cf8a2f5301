"""docs/adopt-a-run.md as it is written: its three configurations, unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from safetensors.torch import load_file

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.errors import RunStopped
from hf_tinylm.files import bundled, sha256_of_file
from hf_tinylm.training.metrics import read_rows

DOCS = Path(__file__).parents[2] / "docs"
ONE, FOUR, BRANCH = (Path("runs/adopt") / name for name in ("1-one-window", "2-four-windows", "3-branch"))


def train(name: str, *settings: str) -> None:
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    assert recipe(["--config", name, "--use_cpu", "--cpu_threads", "1", *settings]) == 0


def novels(run: Path, step: int) -> float:
    """The validation loss on the held-out novels after an update."""
    rows = {row["step"]: row for row in read_rows(run / "metrics.jsonl") if "eval_loss" in row}
    return float(rows[step].get("eval_sets", {}).get("novels", rows[step])["eval_loss"])


def identity(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())["identity"]
    return found


@pytest.mark.slow
def test_a_run_at_its_plateau_is_explained_adopted_and_goes_on_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phase 2 is stopped at its half, where phase 3 leaves it, and then goes on: 65,536 tokens more for each."""
    monkeypatch.chdir(tmp_path)
    assert main(["tokenizer", "train", "--config", "adopt-1"]) == 0
    for name in ("adopt-1", "adopt-3"):
        assert main(["prepare", "--config", name]) == 0
    train("adopt-1")
    with pytest.raises(RunStopped):
        train("adopt-2", "--stop_after_updates", "512")
    start = FOUR / "checkpoint-00000512"

    # the cause is named from the noise scale, with the next step
    capsys.readouterr()
    assert main(["diagnose", str(FOUR), "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    plateau = found["plateau_without_decay"]
    assert plateau["title"] == "The loss is flat because the batch is far below the noise scale"
    assert "a batch of 128 tokens is far below the noise scale of " in plateau["evidence"]
    assert "--init_from CHECKPOINT --global_batch_tokens N" in plateau["next_step"]

    # equal extra tokens, another end
    train("adopt-3")
    train("adopt-2", "--resume_from_checkpoint", "auto")
    tokens = {row["step"]: row["supervised_tokens"] for row in read_rows(FOUR / "metrics.jsonl") if "loss" in row}
    assert tokens[1024] - tokens[512] == json.loads((BRANCH / "DONE.json").read_text())["supervised_tokens"] == 65_536
    assert novels(BRANCH, 64) < novels(FOUR, 512) - 0.1
    assert novels(BRANCH, 64) < novels(FOUR, 1024) - 0.1

    # weights kept, moments kept and then zero
    first, second = (identity(run)["training"]["init_from"] for run in (FOUR, BRANCH))
    for run, record, folder in ((FOUR, first, ONE / "checkpoint-00000512"), (BRANCH, second, start)):
        assert record["weights_sha256"] == {"model.safetensors": sha256_of_file(folder / "model.safetensors")}
        assert record["manifest_sha256"] == sha256_of_file(folder / "manifest.json")
        assert record["parent_identity"] == identity(folder.parent)
        assert len(read_rows(run / "events.jsonl")[0]["init_weights_sha256"]) == 64
    assert [read_rows(run / "events.jsonl")[0]["moments"] for run in (FOUR, BRANCH)] == ["kept", "zero"]
    for run, step, updates in ((FOUR, 1024, 512 + 1024), (BRANCH, 64, 64)):  # AdamW's own count of its updates
        moments = load_file(run / f"checkpoint-{step:08d}" / "optimizer.safetensors")
        assert float(moments["step.model.norm.weight"]) == updates
    assert (first["inherited_tokens"], second["inherited_tokens"]) == (16_384, 16_384 + 512 * 128)
    assert identity(BRANCH)["data"]["eval_sets"] == {"novels": identity(FOUR)["data"]["shards_sha256"]}

    # one history
    assert main(["report", str(BRANCH), "--png"]) == 0
    page = (BRANCH / "report.html").read_text()
    told = page[page.index("Lineage: one history") :]
    assert re.search(r"1-one-window.*2-four-windows.*3-branch", told, re.DOTALL)
    assert "validation: novels" in told
    assert "validation: novels-and-bible" in told


def test_the_page_shows_the_shipped_configurations_and_a_small_picture() -> None:
    page = (DOCS / "adopt-a-run.md").read_text(encoding="utf-8")
    for name in ("adopt-1", "adopt-2", "adopt-3"):
        assert f"recipes/configs/{name}.yaml" in page
    picture = (DOCS / "pictures" / "adopt-a-run.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) < 200_000


def test_the_three_phases_share_shape_tokenizer_and_windows() -> None:
    """What a branch may not change is equal in all three; phase 3 validates the pack that phases 1 and 2 trained on."""
    first, second, third = (load_config(f"adopt-{number}") for number in (1, 2, 3))
    assert first.model == second.model == third.model
    assert first.tokenizer == second.tokenizer == third.tokenizer
    assert first.data == second.data
    assert third.evaluation.eval_sets[0].shards == first.data.shards != third.data.shards
    assert third.data.validation_fraction == first.data.validation_fraction, "or held-out novels would be trained on"
    for config, parent in ((second, first), (third, second)):
        folder = Path(str(config.training.init_from))
        assert folder == Path(str(parent.training.output_dir)) / "checkpoint-00000512"
        assert 512 % int(parent.training.save_steps or 0) == 0
    assert len({config.training.seed for config in (first, second, third)}) == 3
