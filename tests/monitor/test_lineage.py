"""A branch and the runs before it as one history, from folders that are there, moved, gone or another run by now."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.cli import main
from hf_tinylm.contract import beginning
from hf_tinylm.monitor.curves import run_charts
from hf_tinylm.monitor.lineage import curves_of, lineage_of
from hf_tinylm.monitor.report import report_page
from hf_tinylm.monitor.run import Run

OLD, NEW = "0" * 64, "1" * 64


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    contract: dict[str, Any] = json.loads((folder / "run.json").read_text())
    change(contract)
    (folder / "run.json").write_text(json.dumps(contract))
    return contract


def branch(child: Path, parent: Path, step: int, inherited: int, keeps: bool, **data: Any) -> None:
    """Let the run of `child` begin with the weights that `parent` had after `step` updates of 100 tokens."""
    start = {
        **{"path": str(parent.resolve() / f"checkpoint-{step:08d}"), "weights_sha256": {"model.safetensors": "5" * 64}},
        **{"manifest_sha256": "7" * 64, "with_optimizer": keeps, "step": step, "parent_tokens": 100 * step},
        **{"inherited_tokens": inherited, "parent_identity": json.loads((parent / "run.json").read_text())["identity"]},
    }

    def change(contract: dict[str, Any]) -> None:
        contract["identity"]["training"]["init_from"] = start
        contract["identity"]["data"] |= data

    edit(child, change)


@pytest.fixture
def family(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> list[Path]:
    """Three runs of 10 updates of 100 tokens: the second begins after 6 of the first, the third after 8 of the second.

    The third is of another pack and validates that of the others as `novels`.
    """
    first, second, third = (
        write_run(name, learning_rate=rate) for name, rate in (("one", 1e-4), ("two", 4e-4), ("three", 2e-3))
    )
    edit(first, lambda c: c["identity"]["data"].update(shards_sha256=OLD))
    branch(second, first, 6, 600, keeps=True, shards_sha256=OLD)
    branch(third, second, 8, 1_400, keeps=False, shards_sha256=NEW, eval_sets={"novels": OLD})
    edit(third, lambda c: c["config"]["data"].update(shards="packs/wide"))
    for folder, step, loss in ((first, 6, 7.0), (second, 8, 6.0)):
        add_lines(folder / "metrics.jsonl", {"step": step, "eval_loss": loss})
    add_lines(third / "metrics.jsonl", {"step": 5, "eval_loss": 5.5, "eval_sets": {"novels": {"eval_loss": 5.0}}})
    return [first, second, third]


def test_three_runs_are_one_curve_over_the_tokens_of_all_with_a_mark_at_each_branch(family: list[Path]) -> None:
    loss, rate, norm, *own = curves_of(Run(family[2]))
    assert [chart.marks for chart in (loss, rate, norm)] == [[600.0, 1_400.0]] * 3
    training = [line for line in loss.lines if not line.dots]
    assert [line.label for line in training] == ["training", "", ""]
    xs = [x for line in training for x in line.xs]
    assert xs == [100.0 * n for n in range(1, 25)]  # 6 updates, 8, and 10, each of 100 tokens and none twice
    ys = [y for line in training for y in line.ys]
    assert ys == [8 - n / 100 for n in (*range(1, 7), *range(1, 9), *range(1, 11))]
    assert [y for line in rate.lines for y in line.ys] == [1e-3] * 24
    assert [chart.title for chart in own] == [chart.title for chart in run_charts(Run(family[2]))[3:]]


def test_the_held_out_text_of_the_first_run_is_one_series_through_all(family: list[Path]) -> None:
    """Runs one and two validate it as their own, run three as `novels`; run three's own set is a series of its own."""
    dots = {line.label: (list(line.xs), list(line.ys)) for line in curves_of(Run(family[2]))[0].lines if line.dots}
    assert dots == {
        "validation: novels": ([600.0, 600.0 + 800.0, 1_400.0 + 500.0], [7.0, 6.0, 5.0]),
        "validation: wide": ([1_400.0 + 1_000.0, 1_400.0 + 500.0], [7.25, 5.5]),  # in the order of the rows
    }


def test_the_report_tells_what_each_run_kept_and_changed(family: list[Path], html_text: Callable[[str], str]) -> None:
    words = html_text(report_page(Run(family[2])))
    told = words[words.index("Lineage: one history") : words.index("Curves")]
    assert "one began with new weights own tokens, up to the branch 600 tokens before 0" in told
    assert f"two began with {family[0]}/checkpoint-00000006, update 6 kept weights and the optimizer's moments" in told
    assert f"three began with {family[1]}/checkpoint-00000008, update 8 kept weights; moments zero" in told
    assert "the checkpoint is gone" in told
    assert "own tokens 1,000 tokens before 1,400" in told
    assert "training.learning_rate: 0.0004 -> 0.002" in told
    assert f"data.shards_sha256: '{OLD}' -> '{NEW}'" in told
    assert "5" * 64 in told
    assert "other set validation loss" in html_text(report_page(Run(edit_last(family[2]))))


def edit_last(folder: Path) -> Path:
    """The last validation has the other set too."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "eval_loss": 5.2, "eval_sets": {"novels": {"eval_loss": 4.9}}}) + "\n")
    return folder


def test_a_run_that_began_with_new_weights_has_no_lineage(family: list[Path]) -> None:
    run = Run(family[0])
    assert len(lineage_of(run)) == 1
    assert "Lineage" not in report_page(run)
    assert [chart.title for chart in curves_of(run)] == [chart.title for chart in run_charts(run)]


def test_runs_that_were_moved_together_find_each_other(family: list[Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = [Path(shutil.move(folder, tmp_path / "elsewhere" / folder.name)) for folder in family]
    assert [one.run.folder for one in lineage_of(Run(moved[2])) if one.run] == moved
    assert len(lineage_of(Run(moved[2]))) == 3


def test_a_parent_that_is_gone_or_another_run_by_now_leaves_a_gap_and_is_said(
    family: list[Path], html_text: Callable[[str], str]
) -> None:
    edit(family[1], lambda c: c["identity"]["training"].update(learning_rate=9.0))
    found = lineage_of(Run(family[2]))
    assert [one.run is not None for one in found] == [True, False, True], "the first is found without the second"
    lines = [line for line in curves_of(Run(family[2]))[0].lines if not line.dots]
    assert [x for line in lines for x in line.xs] == [100.0 * n for n in (*range(1, 7), *range(15, 25))]
    assert f"{family[1]} holds another run by now, so its curve is not shown." in html_text(report_page(Run(family[2])))
    shutil.rmtree(family[0])
    words = html_text(report_page(Run(family[2])))
    assert f"{family[0]} is gone, so its curve is not shown." in words
    assert "training.learning_rate: 0.0004 -> 0.002" in words, "what changed is recorded in the branch itself"


def test_a_run_that_goes_on_from_a_branch_has_its_ancestors(family: list[Path], write_run: Callable[..., Path]) -> None:
    """`branch_from` copies the rows of its parent, so its first update is the parent's first."""
    identity = json.loads((family[2] / "run.json").read_text())["identity"]
    longer = write_run("longer", updates=20)
    edit(longer, lambda c: c["identity"]["training"].update(branch_from={"parent_identity": identity}))
    assert [one.name for one in lineage_of(Run(longer))] == ["one", "two", "longer"]
    training = [line for line in curves_of(Run(longer))[0].lines if not line.dots]
    assert max(training[-1].xs) == 1_400 + 2_000


@pytest.mark.parametrize(
    "start",
    [
        {"x": 1},
        {"path": ["no"], "weights_sha256": 7, "inherited_tokens": "many", "step": None, "parent_identity": "none"},
        {"path": "\0", "parent_identity": {"training": 3, "data": []}, "weights_sha256": {"<script>": "<script>"}},
        {"path": "<script>/c", "parent_identity": {"training": {"init_from": {"path": "$\\frac"}}}},
    ],
)
def test_a_lineage_that_holds_anything_is_shown_as_text(family: list[Path], start: dict[str, Any]) -> None:
    edit(family[2], lambda c: c["identity"]["training"].update(init_from=start))
    edit(family[2], lambda c: c["identity"]["data"].update(eval_sets={"$\\frac<script>": OLD}))
    page = report_page(Run(family[2]))
    assert "Lineage: one history" in page
    assert "<script>" not in page
    assert beginning({"training": [start]}) is beginning(None) is None


def test_the_picture_of_a_branch_is_of_its_whole_history(
    family: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(family[2]), "--png"]) == 0
    assert capsys.readouterr().out.split() == [str(family[2] / "report.html"), str(family[2] / "report.png")]
    assert (family[2] / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert "over all tokens" in (family[2] / "report.html").read_text()


def test_tail_and_the_timeline_tell_where_a_branch_began(
    family: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    began = {
        "time": 1e9,
        "event": "started",
        "step": 0,
        "updates": 40,
        "train_tokens": 4_000,
        "init_from": "runs/two/c",
    }
    began |= {"inherited_tokens": 1_400, "init_weights_sha256": "a1b2c3d4e5f6a7b8", "moments": "zero"}
    began |= {"changed": ["training.learning_rate: 0.0004 -> 0.002"]}
    (family[2] / "events.jsonl").write_text(json.dumps(began) + "\n")
    edit_last(family[2])
    assert main(["tail", str(family[2])]) == 0
    told = capsys.readouterr().out
    assert (
        "from runs/two/c after 1,400 tokens, weights kept (a1b2c3d4e5f6), moments zero; changed: training.lea" in told
    )
    assert "validation    5.2000 at update 10; novels 4.9000\n" in told
