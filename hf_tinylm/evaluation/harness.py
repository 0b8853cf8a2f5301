"""lm-evaluation-harness on a stock model folder, so that its numbers stand in the same reports as ours."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, DataError, MissingExtraError
from ..files import read_record, sha256_of_json
from ..model_folder import OWN_MODEL_TYPES
from .engines import weights_sha256

PREFIX = "lm-eval:"


def run_harness(
    model: Path,
    task: str,
    data: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
) -> dict[str, Any]:
    """Run one task of lm-eval in float32.

    Args:
        data: a JSONL file of the task's schema that takes the place of its dataset.
        limit: only the first items.

    Returns:
        As `score_suite`, with lm-eval's own metric names; a record holds the metrics of an item, and
        `higher_is_better` says of each metric what lm-eval says (None: nothing).

    Raises:
        MissingExtraError: lm-eval is not installed.
        ConfigError: no such task, or a model that lm-eval does not open.
        DataError: the task's dataset cannot be loaded.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtraError("lm-eval", "lm-eval", f"the suite {PREFIX}{task}")
    if not model.is_dir() or read_record(model / "config.json").get("model_type") in OWN_MODEL_TYPES:
        raise ConfigError(f"lm-eval opens stock model folders; {model} is none. Write one: hf-tinylm export.")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        found = _evaluate(model, _task(task, data, Path(folder)), Path(folder), limit, batch_size, device)
    ((name, metrics),) = found["results"].items()
    version = importlib.metadata.version("lm_eval")
    rule = f"lm-eval {version}, task {task} version {found['versions'].get(name)}"
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    names = [key.partition(",")[0] for key in metrics if key.endswith(",none") and "_stderr" not in key]
    return {
        "items": len(samples),
        "results": {key: _result(metrics, key, rule) for key in names},
        "rule": {
            **{"task": task, "lm_eval": version, "task_version": found["versions"].get(name)},
            "few_shot": found["n-shot"].get(name),
        },
        "higher_is_better": {key: found["higher_is_better"].get(name, {}).get(key) for key in names},
        "items_sha256": sha256_of_json([sample["doc_hash"] for sample in samples]),
        "ids_sha256": None,
        "facts": {"model_sha256": weights_sha256(model), "precision": "float32", "batch_size": batch_size},
        "records": [
            {"item": sample["doc_id"], **{key: sample[key] for key in names if key in sample}} for sample in samples
        ],
    }


def _evaluate(model: Path, task: str, folder: Path, limit: int | None, batch_size: int, device: str | None) -> Any:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder))
    try:
        return lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32"},
            tasks=[task],
            task_manager=tasks,
            limit=limit,
            batch_size=batch_size,
            device=device or "cpu",
            log_samples=True,
            bootstrap_iters=1000,
        )
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"lm-eval could not load the dataset of {task}: {reason} Give its rows: --data FILE.jsonl."
        ) from error


def _task(task: str, data: str | None, folder: Path) -> str:
    """The name of the task; with `data`, of one like it that reads the file, written to `folder`.

    Raises:
        ConfigError: no such task, or no such file.
    """
    from lm_eval.tasks import TaskManager

    known = TaskManager().task_index.get(task)
    if known is None or known.yaml_path is None:
        raise ConfigError(f"lm-eval has no single task {task} (groups are run task by task). See: lm-eval ls tasks.")
    if data is None:
        return task
    if not Path(data).is_file():
        raise ConfigError(f"{data} does not exist. Give a JSONL file of the schema of {task}.")
    file = str(Path(data).resolve())
    values = {
        "include": str(known.yaml_path),
        "task": f"{task}_of_file",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": dict.fromkeys(("train", "validation", "test"), file)},
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(values["task"])


def _result(metrics: dict[str, Any], name: str, rule: str) -> dict[str, Any]:
    value, error = metrics[f"{name},none"], metrics.get(f"{name}_stderr,none")
    error = error if isinstance(error, int | float) else None
    interval = None if error is None else [value - 1.96 * error, value + 1.96 * error]
    return {"value": value, "stderr": error, "interval": interval, "rule": rule}
