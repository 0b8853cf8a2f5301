"""Curves of several runs: what may stand on the same axes, and what the table says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.cli import main
from hf_tinylm.errors import ConfigError, ContractError
from hf_tinylm.evaluation.curves import check_curves, curve_lines, curve_report, load_published, load_run
from hf_tinylm.training.curves import draw_losses

MODEL = {
    **{"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "tie_word_embeddings": True},
}
TOKENIZER, SPLIT = "a1" * 32, "b2" * 32
Write = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """A function that writes a run of 1,000 tokens and 36 s an update, evaluated after every second one."""

    def write(name: str, losses: list[float], length: int = 32, **data: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        known = {"sequence_length": length, "tokenizer_sha256": TOKENIZER, "manifest_sha256": SPLIT, **data}
        identity = {"model": MODEL, "training": {"eval_tokens": 2048}, "data": known}
        (folder / "run.json").write_text(json.dumps({"identity": identity}))
        rows: list[dict[str, Any]] = []
        for step, loss in enumerate(losses, start=1):
            rows.append({"step": step, "supervised_tokens": 1_000 * step, "loss": loss, "wall_seconds": 36.0 * step})
            if step % 2 == 0:
                rows.append({"step": step, "eval_loss": loss + 0.5, "bits_per_byte": loss / 2, "eval_tokens": 2048})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def test_the_table_has_the_last_values_and_where_the_new_run_reaches_the_baseline(write_run: Write) -> None:
    base = load_run(write_run("base", [6.0, 5.0, 4.5, 4.0]))
    new = load_run(write_run("new", [5.0, 4.2, 4.1, 3.9, 3.8, 3.7]))
    assert check_curves([base, new], "loss", ["tokens", "flops", "hours"]) == []
    report = curve_report([base, new], "loss", [])
    first, second = report["curves"]
    # 6 FLOPs a weight and token (embedding 16,384, attention 3,072 and feed-forward 6,144 in each of 2 layers), and
    # 12 x 2 layers x 32 wide x 32 long for attention; gains of norms are no matrix products.
    assert first["flops"] == pytest.approx(4_000 * (6 * (16_384 + 2 * (3_072 + 6_144)) + 12 * 2 * 32 * 32), rel=0.01)
    assert (first["tokens"], first["hours"], first["training"], first["validation"]) == (4_000, 0.04, 4.0, 4.5)
    reached = second["reached"]
    assert (reached["of"], reached["value"], reached["tokens"], reached["baseline_tokens"]) == (
        *("validation", 4.5),
        *(4_000, 4_000),
    )  # 4.7 at 2,000 and 4.4 at 4,000
    assert second["at_equal_tokens"] == {"tokens": 4_000, "baseline": 4.5, "value": pytest.approx(4.4)}
    lines = curve_lines(report)
    assert "reaches the last validation value of" in lines[-2]
    assert curve_report([new, base], "loss", [])["curves"][1]["reached"] is None
    assert "does not reach" in curve_lines(curve_report([new, base], "loss", []))[-2]


def test_runs_without_validation_are_compared_by_their_training_loss(write_run: Write) -> None:
    runs = [load_run(write_run("a", [6.0])), load_run(write_run("b", [5.9]))]
    reached = curve_report(runs, "loss", [])["curves"][1]["reached"]
    assert (reached["of"], reached["tokens"]) == ("training", 1_000)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"tokenizer_sha256": "c3" * 32}, "their tokenizers are a1a1a1a1a1a1 and c3c3c3c3c3c3"),
        ({"manifest_sha256": "c3" * 32}, "their validation splits are b2b2b2b2b2b2 and c3c3c3c3c3c3"),
        ({"length": 64}, "their validation windows are sequence_length 32"),
        ({"document_attention": True}, "document_attention True"),
    ],
)
def test_raw_losses_of_other_tokens_or_texts_are_refused_and_bits_per_byte_offered(
    write_run: Write, data: dict[str, Any], told: str
) -> None:
    folders = [write_run("a", [6.0, 5.0]), write_run("b", [5.0, 4.0], **data)]
    with pytest.raises(ContractError, match=f"{told}.*--metric bits_per_byte"):
        check_curves([load_run(folder) for folder in folders], "loss", ["tokens"])
    runs = [load_run(folder, "bits_per_byte") for folder in folders]
    (notice,) = check_curves(runs, "bits_per_byte", ["tokens"])
    assert told in notice
    assert [row["validation"] for row in curve_report(runs, "bits_per_byte", [])["curves"]] == [2.5, 2.0]
    assert curve_report(runs, "bits_per_byte", [])["curves"][0]["training"] is None


def test_a_published_curve_is_compared_at_equal_tokens(write_run: Write, tmp_path: Path) -> None:
    run = load_run(write_run("a", [6.0, 5.0, 4.5, 4.0]))  # validation 5.5 at 2,000 and 4.5 at 4,000
    file = tmp_path / "paper.csv"
    file.write_text(
        f"# A paper\n# tokenizer: {TOKENIZER[:12]}\n# split: {SPLIT}\ntokens,validation\n1_000, 6.5\n3000, 5.25\n"
    )
    published = load_published(file)
    assert check_curves([run, published], "loss", ["tokens"]) == []
    row = curve_report([run, published], "loss", [])["curves"][1]
    assert row["at_equal_tokens"] == {"tokens": 3_000, "baseline": pytest.approx(5.0), "value": 5.25}
    assert (row["tokens"], row["validation"], row["flops"], row["hours"]) == (3_000, 5.25, None, None)
    with pytest.raises(ConfigError, match=r"tokens only, no hours.*--over tokens"):
        check_curves([run, published], "loss", ["hours"])
    file.write_text("tokens,validation,tokenizer,split\n1000,6.5,gpt2,c4\n")
    with pytest.raises(ContractError, match="tokenizers are a1a1a1a1a1a1 and 'gpt2'; their validation splits"):
        check_curves([run, load_published(file)], "loss", ["tokens"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tokens,loss\n1,2\n", "no column validation"),
        ("", "no column tokens"),
        ("tokens,validation\n1,2\n", "does not say: which tokenizer"),
        ("tokens,validation,tokenizer,split\n1,2,a,b\n2,2,c,b\n", "names 2 of them: which tokenizer"),
        ("# tokenizer: x\ntokens,validation\n1,2\n", "does not say: which split"),
        ("# tokenizer: x\ntokens,validation\n1,2\n\n2,fast\n", "line 5: validation is 'fast'"),
        ("tokens,validation\n1,2\n3\n", "line 3: validation is None"),
        ("tokens,validation\n2,2\n1,1\n", "tokens must grow"),
        ("tokens,validation\n1,nan\n", "validation is 'nan'"),
    ],
)
def test_a_published_curve_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "paper.csv").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_published(tmp_path / "paper.csv")


def test_the_baseline_is_drawn_under_the_new_run_on_every_axis(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kwargs: (drawn.append(self), path.write_bytes(b"x")))
    curves = [load_run(write_run(name, [6.0, 5.0])).curve for name in ("base", "new")]
    draw_losses(curves, tmp_path / "x.png", ["tokens", "flops", "hours"])
    assert {axes.get_ylabel() for axes in drawn[0].axes} == {"loss, nats per token (dots: validation)"}
    assert [axes.get_xlabel() for axes in drawn[0].axes] == ["tokens", "FLOPs", "hours"]
    for axes, x in zip(drawn[0].axes, ([1e3, 2e3], None, [0.01, 0.02]), strict=True):
        old, old_marks, new, new_marks = axes.lines
        assert max(old.get_zorder(), old_marks.get_zorder()) < min(new.get_zorder(), new_marks.get_zorder())
        assert x is None or np.allclose(new.get_xdata(), x)
        assert [text.get_text().rsplit("/")[-1] for text in axes.get_legend().get_texts()] == ["base", "new"]


def test_a_picture_without_validation_does_not_speak_of_its_dots(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kwargs: (drawn.append(self), path.write_bytes(b"x")))
    curve = load_run(write_run("base", [6.0, 5.0])).curve
    nothing = replace(curve.validation, **{name: np.zeros(0) for name in ("tokens", "flops", "hours", "values")})
    draw_losses([replace(curve, validation=nothing)], tmp_path / "x.png", unit="bits per byte of new text")
    assert [axes.get_ylabel() for axes in drawn[0].axes] == ["bits per byte of new text"]


def test_the_command_prints_the_table_draws_and_refuses(
    write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (str(write_run(name, losses)) for name, losses in (("a", [6.0, 5.0]), ("b", [5.0, 4.0])))
    picture = tmp_path / "curves.png"
    assert main(["eval", "--curves", a, b, "--plot", str(picture), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["curves"]] == [a, b]
    assert report["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["eval", "--curves", a, b, "--metric", "bits_per_byte", "--over", "hours"]) == 0
    assert "last values, bits per byte" in capsys.readouterr().out
    other = str(write_run("c", [5.0, 4.0], tokenizer_sha256="c3" * 32))
    for arguments, told in (
        (["--curves", a], "two different runs"),
        (["--curves", a, a], "two different runs"),
        (["--curves", a, str(tmp_path)], "no run.json"),
        (["--curves", a, b, "--metric", "accuracy"], "--metric accuracy has no curve"),
        (["--curves", a, other], "--metric bits_per_byte"),
        (["--curves", a, b, "--text", "x"], "Leave out --suite"),
        ([a, "--curves", a, b], "Give one model"),
        ([a, "--config", "demo", "--plot", "x.png"], "--curves RUN RUN"),
    ):
        assert main(["eval", *arguments]) == 2, arguments
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert told in errors[0]
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert main(["eval", "--curves", a, b]) == 2
    assert "holds no update yet" in capsys.readouterr().err
