"""What an evaluation leaves: SUITE.json, SUITE.items.jsonl, and a table in the card of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..contract import RUN_FILE, environment
from ..errors import ConfigError
from ..files import read_json, write_json, write_text

BEGIN = "<!-- evaluation: written by hf-tinylm eval, which replaces everything up to the end mark -->"
END = "<!-- end of evaluation -->"
_CHECKPOINT_MANIFEST = "manifest.json"  # a checkpoint's files are hashed: nothing is added to them


def new_report(model: str, suite: str, facts: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The content of SUITE.json: `model suite items results` and all that makes the numbers comparable."""
    rest = {key: value for key, value in found.items() if key not in ("items", "results", "records")}
    return {
        **{"model": model, "suite": suite, "items": found["items"], "results": found["results"]},
        **rest,
        "engine": facts,
        "versions": environment(),
    }


def results_folder(model: Path) -> Path:
    """Where the results of a model are kept.

    RUN/eval for the final folder of a run; RUN/eval/NAME for its checkpoints and GGUF files; else a folder eval in the
    model's own.
    """
    if (model.parent / RUN_FILE).is_file():
        return model.parent / "eval" if model.name == "final" else model.parent / "eval" / model.stem
    return (model if model.is_dir() else model.parent) / "eval"


def save_report(report: dict[str, Any], records: list[dict[str, Any]], folder: Path) -> Path:
    """Write `folder/SUITE.items.jsonl`, then `folder/SUITE.json`; each appears whole. The path of the latter."""
    name = re.sub(r"[^\w.-]+", "-", report["suite"])
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    write_text(folder / f"{name}.items.jsonl", "".join(lines))
    write_json(folder / f"{name}.json", report)
    return folder / f"{name}.json"


def load_report(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A saved report and its records.

    Raises:
        ConfigError: the file is no report, or its records are missing.
    """
    report = read_json(path)
    if isinstance(report, dict) and {"results", "versions", "n-shot"} <= set(report):
        raise ConfigError(
            f"{path} was written by lm-eval itself, without the scores of items that a comparison draws from. Score "
            "the model here: hf-tinylm eval MODEL --suite lm-eval:TASK."
        )
    if not isinstance(report, dict) or not {"model", "suite", "results", "items_sha256"} <= set(report):
        raise ConfigError(f"{path} is no report of hf-tinylm eval. Give a SUITE.json from a folder eval.")
    items = path.with_name(f"{path.stem}.items.jsonl")
    if not items.is_file():
        raise ConfigError(f"{items} does not exist; the scores of each item are needed. Run hf-tinylm eval again.")
    try:
        return report, [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ConfigError(f"{items} is damaged ({error}). Run hf-tinylm eval again.") from error


def update_card(model: Path, reports: Path) -> bool:
    """Put what `reports` holds of this very model into the card, README.md; whether there is a card to write to."""
    if not model.is_dir() or (model / _CHECKPOINT_MANIFEST).is_file():
        return False
    newest = {path: read_json(path) for path in sorted(reports.glob("*.json"))}
    hashes = {path: report.get("engine", {}).get("model_sha256") for path, report in newest.items()}
    from .engines import weights_sha256

    current = weights_sha256(model)
    rows = [row for path, report in newest.items() if hashes[path] == current for row in _rows(report)]
    card = model / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    write_text(card, with_block(text, "\n".join([BEGIN, "", *_TABLE_HEAD, *rows, "", END])))
    return True


_TABLE_HEAD = (
    "## Evaluation",
    "",
    "| suite | items | metric | value | 95% interval | rule |",
    "|---|---|---|---|---|---|",
)


def with_block(text: str, block: str) -> str:
    """`text` with `block` in the place of the one that it holds, else at its end."""
    end = text.find(END)
    begin = text.rfind(BEGIN, 0, end) if end >= 0 else -1
    if begin >= 0:
        return text[:begin] + block + text[end + len(END) :]
    return (text.rstrip("\n") + "\n\n" if text.strip() else "") + block + "\n"


def _rows(report: dict[str, Any]) -> Iterable[str]:
    for name, found in report["results"].items():
        interval = found.get("interval")
        between = "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
        cells = (report["suite"], f"{report['items']:,}", name, f"{found['value']:.4f}", between, found["rule"])
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
