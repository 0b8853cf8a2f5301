"""Every diagnosis on a real small run with its planted fault, made by the script of docs/reading-a-run.md."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest

from hf_tinylm.monitor.diagnosis import NAMES, diagnose
from hf_tinylm.monitor.run import Run

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = run_path(str(DOCS / "pictures" / "reading_a_run.py"))
# A model of a quarter of the script's size in half as many micro-batches; its own best rate is five times as high.
SMALL = "--hidden_size 32 --num_attention_heads 2 --num_key_value_heads 1 --intermediate_size 96 --eval_tokens 2048"
SMALL += " --per_device_train_batch_size 8 --learning_rate 0.02"
SHORT = f"--train_tokens {60 * SCRIPT['BATCH_TOKENS']}"  # where the fault is one of time
FAULTS: list[tuple[str, str, set[str]]] = [
    ("unshifted_targets", SHORT, {"first_loss_far_from_uniform", "loss_too_good"}),
    ("missing_division", f"{SHORT} --per_device_train_batch_size 4", {"training_loss_a_multiple", "clipping_always"}),
    ("five_bad_batches", "", {"spike_that_recovered", "norm_spikes"}),
    ("weights_damaged", "", {"spike_that_stayed"}),
    ("rate_far_too_high", "--learning_rate 4e-3", {"divergence"}),
    ("rate_too_low", "--learning_rate 2e-4", {"rate_too_low"}),
    ("rate_never_lowered", "--learning_rate 0.4", {"plateau_without_decay"}),
    ("too_short", "", {"still_falling"}),
    ("batch_too_small", "", {"batch_below_noise_scale"}),
    ("tiny_data", "", {"training_and_validation_part", "cliffs_at_epoch_borders"}),
    ("one_shard_replayed", "", {"text_replayed"}),
    ("one_source_after_the_other", "", {"source_loss_rises"}),
    ("neighbour_on_the_machine", "", {"throughput_drop"}),
    ("slow_disk", f"--train_tokens {40 * SCRIPT['BATCH_TOKENS']}", {"input_starvation"}),
    ("saves_all_the_time", SHORT, {"checkpoints_cost"}),
    ("peak_too_low", SHORT, {"mfu_too_high"}),
    ("peak_of_a_gpu", SHORT, {"mfu_too_low"}),
]
# A neighbour on the machine that runs these tests makes the healthy run slower in earnest.
OF_THE_MACHINE = {"throughput_drop"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which share tokenizer and shards."""
    return tmp_path_factory.mktemp("runs")


def found_in(run: Path) -> set[str]:
    return {one.name for one in diagnose(Run(run))}


def test_every_diagnosis_and_every_fault_of_the_script_is_in_the_matrix() -> None:
    assert set().union(*(names for _, _, names in FAULTS)) == set(NAMES)
    assert set(SCRIPT["FAULTS"]) <= {run for run, _, _ in FAULTS}


@pytest.mark.slow
@pytest.mark.long
def test_the_healthy_run_has_no_finding(work: Path) -> None:
    SCRIPT["good"](work / "good", *SMALL.split())
    assert found_in(work / "good") - OF_THE_MACHINE == set()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("run", "settings", "names"), FAULTS, ids=[run for run, _, _ in FAULTS])
def test_a_planted_fault_is_found(run: str, settings: str, names: set[str], work: Path) -> None:
    (SCRIPT["RUNS"] | SCRIPT["FAULTS"])[run](work / run, *SMALL.split(), *settings.split())
    assert names <= found_in(work / run)
