"""The batch-size finder: its search on made-up devices, and one real device that runs out of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError, TrainingError
from hf_tinylm.preflight.batch_size import BatchSearch, Trial, search, sizes_of, try_size
from hf_tinylm.sections import RunConfig


def device(limit: int, best: int) -> tuple[Callable[[int], Trial], list[int]]:
    """A device that holds `limit` rows and is fastest at `best`, and the list of sizes it was asked for."""
    asked: list[int] = []

    def attempt(rows: int) -> Trial:
        asked.append(rows)
        if rows > limit:
            return Trial(rows, fits=False, reason="out of memory")
        return Trial(rows, fits=True, tokens_per_second=1_000 - abs(rows - best), peak_bytes=rows)

    return attempt, asked


@pytest.mark.parametrize(
    ("sizes", "limit", "best"),
    [
        ([1, 2, 4, 8, 16, 32, 64], 19, 8),
        ([1, 2, 3, 4, 6, 8, 12, 16, 24, 48], 12, 12),
        ([1, 2, 3, 4, 6, 8, 12, 16, 24, 48], 47, 6),
        ([1, 2, 3, 5, 6, 10, 15, 30], 1_000, 30),
        ([1, 7], 3, 1),
        ([4], 4, 4),
    ],
)
def test_the_largest_that_fits_and_the_fastest_are_found_among_the_possible_sizes(
    sizes: list[int], limit: int, best: int
) -> None:
    attempt, asked = device(limit, best)
    found = search(sizes, attempt)
    assert found.largest == max(size for size in sizes if size <= limit)
    assert found.fastest == best
    assert len(set(asked)) == len(asked), "no size is tried twice"
    assert set(asked) <= set(sizes)
    assert [trial.rows for trial in found.trials] == sorted(asked)
    assert f"largest that fits: {found.largest}; fastest: {best}" in found.lines()[-1]


def test_sizes_divide_every_batch_of_a_run_whose_batch_grows() -> None:
    """8 windows, then 12, on two processes: 4 and 6 each."""
    settings = ["--sequence_length", "32", "--global_batch_tokens", "256", "--batch_growth", "[[1000, 384]]"]
    assert sizes_of(load_config(None, settings), 2) == [1, 2]
    with pytest.raises(ConfigError, match=r"divisor of global_batch_tokens and batch_growth=128 is no whole number"):
        sizes_of(load_config(None, settings), 3)


def test_a_device_that_holds_not_even_one_row_is_an_error_that_says_what_to_change() -> None:
    attempt, _ = device(0, 1)
    with pytest.raises(TrainingError, match=r"Not even 1 row.*out of memory.*gradient_checkpointing"):
        search([1, 2, 4], attempt)


def test_only_sizes_that_divide_an_update_on_every_process_are_possible(tiny_config: Path) -> None:
    config = load_config(str(tiny_config))  # 8 windows of 32 tokens an update
    assert sizes_of(config, 1) == [1, 2, 4, 8]
    assert sizes_of(config, 2) == [1, 2, 4]
    assert sizes_of(config, 1, max_rows=3) == [1, 2]
    with pytest.raises(ConfigError, match="on each of 3 processes"):
        sizes_of(config, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_measures_real_updates_and_writes_the_fastest(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "tuned.yaml"
    settings = ["--config", str(tiny_config), "--seconds", "0.2", "--max_rows", "2", "--write", str(target)]
    assert main(["find-batch", *settings, "--seed", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["rows"] for trial in found["trials"]] == [1, 2]
    for trial in found["trials"]:
        assert trial["fits"] is True
        assert 10 < trial["tokens_per_second"] < 1e6
        assert 1e8 < trial["peak_bytes"] < 4e9
    assert found["largest"] == 2
    written = load_config(str(target))
    assert written.training.per_device_train_batch_size == found["fastest"]
    assert written.training.seed == 9
    assert target.read_text().startswith("# per_device_train_batch_size was measured")
    assert main(["find-batch", *settings]) == 2
    assert "would be replaced" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_running_out_of_memory_in_a_try_is_a_result_and_another_failure_is_not(tiny_config: Path) -> None:
    """A process that may hold 2 GB of data trains the tiny model, and cannot make one of 4 GB."""
    config = load_config(str(tiny_config))
    config.model.hidden_size, config.model.intermediate_size, config.model.num_attention_heads = 8_192, 40_000, 64
    found = try_size(config, 1, 0.1, memory_limit=2 * 10**9)
    assert not found.fits
    assert found.reason
    assert found.tokens_per_second is None
    config.training.fp16 = True
    with pytest.raises(TrainingError, match=r"The try with 1 row\(s\) failed: fp16 needs a GPU"):
        try_size(config, 1, 0.1)


def test_preflight_passes_on_to_the_finder(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, float, int | None]] = []

    def instead(config: RunConfig, processes: int, seconds: float, max_rows: int | None, tell: object) -> BatchSearch:
        asked.append((processes, seconds, max_rows))
        return BatchSearch([Trial(2, True, 5.0, 6)], 2, 2)

    monkeypatch.setattr("hf_tinylm.preflight.batch_size.find_batch", instead)
    assert main(["preflight", "--config", str(tiny_config), "--find-batch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fastest"] == 2
    assert asked == [(1, 10.0, None)]
    assert main(["preflight", "--config", str(tiny_config), "--write", "x.yaml"]) == 2
    assert "--write goes with --find-batch" in capsys.readouterr().err
