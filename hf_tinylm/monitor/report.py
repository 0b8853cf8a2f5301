"""`hf-tinylm report`: everything that a run's folder says of it, as one page that needs nothing but itself."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ..contract import MANIFEST, RUN_FILE
from ..files import read_json, sha256_of_file, write_text
from .curves import clipped_share, drawn, run_charts
from .diagnosis import diagnose
from .events import clock
from .html import Html, element, leaves, missing, page, section, table
from .lineage import lineage_section
from .parts import checkpoints, evaluations, findings, hardware, incidents, samples, timeline, times, whole
from .planned import planned_and_measured
from .run import Run

REPORT = "report.html"
_MOMENTS = 12  # of samples
_EVENTS = 2_000


def report_page(run: Run) -> str:
    """The page of one run."""
    parts = (
        *(planned_and_measured(run), findings(diagnose(run)), lineage_section(run), _curves(run), evaluations(run)),
        samples(run, _MOMENTS),
        *(incidents(run), times(run), hardware(run), checkpoints(run), timeline(run, _EVENTS)),
        *(_contract(run), _data(run), _environment(run), _hashes(run)),
    )
    notes = [element("p", note, name="bad") for note in run.missing]
    return page(f"{run.name}: {run.status()}", _subtitle(run), *notes, *parts)


def write_report(folder: Path) -> None:
    """Write the report of a run that has ended into its folder; a failure is a notice, not the run's."""
    try:
        write_text(folder / REPORT, report_page(Run(folder)))
    except Exception as error:  # whatever it is: the run itself is done and well
        print(f"notice: the report was not written ({error!r}). Try: hf-tinylm report {folder}", file=sys.stderr)


def _subtitle(run: Run) -> Html:
    note, expect = run.fact("facts", "note"), run.fact("facts", "expect")
    lines = [*run.origin(), f"read {clock(time.time())}"]
    lines += [f"note: {note}"] if note else []
    lines += [f"expected: {expect}"] if expect else []
    return Html("".join(element("p", line, name="soft") for line in lines))


def _curves(run: Run) -> Html:
    """Everything over tokens, and the loss over hours."""
    over_hours = run_charts(run, "hours")[0]
    over_hours.title = "loss over hours, nats per token"
    return section("Curves", drawn([*run_charts(run), over_hours]), clipped_share(run))


def _contract(run: Run) -> Html:
    identity = {key: run.fact("identity", key) for key in ("model", "training")}
    rows = [*leaves(identity), *leaves({"execution": run.fact("execution")})]
    if not run.contract:
        return section("Contract", missing("run.json is missing."))
    whole = json.dumps(run.fact("config"), indent=1, ensure_ascii=False)
    more = element("details", element("summary", "the whole configuration"), element("pre", whole))
    return section("Contract", table((), rows), more)


def _data(run: Run) -> Html:
    rows = leaves(run.fact("identity", "data") or {})
    if not rows:
        return section("Data", missing("run.json does not say what the run was trained on."))
    sources = run.fact("config", "data", "sources") or run.fact("config", "data", "conversations")
    named = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    listed = [(one.get("name"), one.get("path"), one.get("licence")) for one in named]
    return section("Data", table((), rows), table(("source", "path", "licence"), listed), _pack(run))


def _pack(run: Run) -> Html:
    """The pack's own manifest, when it still lies where the run read it and is the one that it read."""
    shards = run.fact("config", "data", "shards")
    path = Path(str(shards)) / "manifest.json" if shards else None
    if path is None or not path.is_file():
        return missing("The pack's manifest is not where the run read it, so its counts are not shown.")
    if sha256_of_file(path) != run.fact("identity", "data", "manifest_sha256"):
        return missing(f"{path} is of another pack than the run read, so its counts are not shown.")
    manifest = read_json(path)
    parts = manifest.get("sources") or {}
    rows = [(name, whole(one.get("ids")), whole(one.get("documents"))) for name, one in parts.items()]
    words = f"{whole(manifest.get('ids'))} ids in {whole(manifest.get('documents'))} documents."
    return Html(element("p", words) + table(("source", "ids", "documents"), rows))


def _environment(run: Run) -> Html:
    rows = [row for row in leaves(run.fact("environment") or {}) if row[0] != "git_diff"]
    diff = run.fact("environment", "git_diff")
    more = element("details", element("summary", "uncommitted changes"), element("pre", diff)) if diff else Html()
    return section("Environment", table((), rows), more)


def _hashes(run: Run) -> Html:
    """Hashes that the run recorded, and those of what lies in its folder now."""
    found = {"tokenizer": run.fact("identity", "data", "tokenizer_sha256")}
    found["pack manifest"] = run.fact("identity", "data", "manifest_sha256")
    weights = run.done.get("final_weights_sha256")
    found |= {f"final/{name}": digest for name, digest in weights.items()} if isinstance(weights, dict) else {}
    found["manifest of the last checkpoint"] = run.done.get("last_checkpoint_manifest_sha256")
    here = [Path(RUN_FILE), *(Path(one["name"]) / MANIFEST for one in run.checkpoints())]
    now = {f"{path}, as it is now": sha256_of_file(run.folder / path) for path in here if (run.folder / path).is_file()}
    rows = [(name, element("span", digest, name="hash")) for name, digest in (found | now).items() if digest]
    return section("Hashes (SHA-256)", table((), rows))
