"""What a user installs: an instant command line, a whole wheel, pins that fit, and the project's own machinery."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


def in_fresh_python(code: str) -> str:
    """What a new interpreter prints for `code`."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- an instant command line


@pytest.mark.parametrize(
    "code",
    [
        "import hf_tinylm",
        "from hf_tinylm.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from hf_tinylm.cli import main\ntry: main(['prepare', '--help'])\nexcept SystemExit: pass",
    ],
    ids=["import", "help", "help of a command"],
)
def test_importing_the_package_and_asking_for_help_loads_nothing_heavy(code: str) -> None:
    code += f"\nimport sys; print('loaded:', *({set(HEAVY)} & sys.modules.keys()))"
    assert in_fresh_python(code).splitlines()[-1] == "loaded:"


def test_importing_the_package_and_asking_for_help_take_a_moment() -> None:
    """Half a second each on an idle core; the best of three, with room for a busy machine."""
    for arguments in (["-c", "import hf_tinylm"], ["-m", "hf_tinylm.cli", "--help"]):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 1.5


def test_every_public_name_of_the_package_is_there() -> None:
    names = in_fresh_python(
        "import hf_tinylm\nfor name in hf_tinylm.__all__: print(name, getattr(hf_tinylm, name) is not None)"
    )
    assert {"LMTrainer True", "TinyLMForCausalLM True", "load_config True", "__version__ True"} <= set(
        names.split("\n")
    )
    assert in_fresh_python("import hf_tinylm; print(hasattr(hf_tinylm, 'nothing'))") == "False\n"


def test_the_package_and_its_metadata_name_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert in_fresh_python("import hf_tinylm; print(hf_tinylm.__version__)").strip() == project["version"]


# --- a whole wheel


def test_a_wheel_carries_everything_that_a_checkout_has(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"hf_tinylm/{path.relative_to(ROOT / 'hf_tinylm').as_posix()}" for path in (ROOT / "hf_tinylm").rglob("*.py")
    }
    for folder in ("recipes", "tokenizer", "eval"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        expected |= {f"hf_tinylm/bundled/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert expected - packed == set()
    assert {
        "hf_tinylm/py.typed",
        *(f"hf_tinylm/modeling/native/{name}" for name in ("attention.c", "loss.c", "numbers.h")),
        "hf_tinylm/bundled/recipes/pretrain.py",
        "hf_tinylm/bundled/recipes/configs/demo.yaml",
        "hf_tinylm/bundled/recipes/accelerate/multi_gpu.yaml",
        "hf_tinylm/bundled/recipes/corpora/austen.txt.xz",
    } <= packed
    for folder in ("tokenizer", "eval"):
        assert any(name.startswith(f"hf_tinylm/bundled/{folder}/") for name in packed), folder


def test_a_wheel_carries_nothing_else(wheel: Path) -> None:
    packed = zipfile.ZipFile(wheel).namelist()
    strange = [name for name in packed if not name.startswith(("hf_tinylm/", "hf_tinylm-"))]
    built = [name for name in packed if "__pycache__" in name or name.endswith((".pyc", ".gguf", ".safetensors"))]
    assert strange + built == []
    assert wheel.stat().st_size < 10_000_000


TINY = """
model: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 128}
tokenizer: {tokenizer_path: tokenizer, vocab_size: 512}
data:
  shards: shards
  sequence_length: 64
  validation_fraction: 0.1
  sources:
    - {name: austen, path: "bundled:austen.txt.xz", splitter: paragraphs_4096, max_documents: 60}
training:
  output_dir: run
  train_tokens: 9_000
  global_batch_tokens: 1_024
  per_device_train_batch_size: 8
  learning_rate: 1e-3
  warmup_steps: 2
  use_cpu: true
  bf16: false
  save_steps: 5
evaluation: {eval_tokens: 1_024}
export: {gguf: []}
"""


@pytest.mark.slow
def test_the_wheel_alone_goes_from_text_to_a_gguf_file(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, away from the checkout; only dependencies come from the one that runs the tests."""
    python = environment_with(wheel, tmp_path / "environment")
    away = tmp_path / "away"
    away.mkdir()
    (away / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (tmp_path / "home").mkdir()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    keep = {key: value for key, value in os.environ.items() if key in ("LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")}
    env = {**keep, "PATH": path, "HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}

    def run(*command: str) -> str:
        result = subprocess.run(command, cwd=away, env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout.strip()

    home = Path(run(str(python), "-c", "import hf_tinylm; print(hf_tinylm.__file__)"))
    assert home.is_relative_to(tmp_path / "environment")
    recipes = Path(run("hf-tinylm", "where", "recipes"))
    assert recipes == home.parent / "bundled" / "recipes"

    run("hf-tinylm", "tokenizer", "train", "--config", "tiny.yaml")
    run("hf-tinylm", "prepare", "--config", "tiny.yaml")
    run(str(python), "-m", "accelerate.commands.launch", str(recipes / "pretrain.py"), "--config", "tiny.yaml")
    run("hf-tinylm", "export", "run/final", "--output_dir", "exported", "--gguf", "f16")

    rows = [json.loads(line) for line in (away / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "loss" in row]
    assert [row["step"] for row in updates] == list(range(1, 10))  # 8 full updates of 1,024 and one of 808
    assert updates[-1]["supervised_tokens"] == 9_000
    assert updates[-1]["loss"] < updates[0]["loss"]
    assert json.loads((away / "run" / "DONE.json").read_text())["updates"] == 9
    assert json.loads((away / "run" / "final" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (away / "exported" / "model.safetensors").is_file()
    (gguf,) = (away / "exported").rglob("*.gguf")
    assert gguf.read_bytes()[:4] == b"GGUF"


def environment_with(wheel: Path, folder: Path) -> Path:
    """A new environment holding only `wheel`, which sees this one's other packages; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)], check=True)
    here = sysconfig.get_path("purelib")
    there = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # A path that a .pth file adds comes after the environment's own, and .pth files inside it are not read: the
    # editable install of this checkout stays invisible.
    (Path(there) / "dependencies.pth").write_text(here + "\n", encoding="utf-8")
    assert here in site.getsitepackages()
    return python


# --- pins


def test_every_pin_lies_in_the_range_that_the_project_allows() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    ranges = {r.name: r.specifier for r in map(Requirement, project["dependencies"] + extras)}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert {"torch", "transformers"} <= {pin.name for pin in pins}
    for pin in pins:
        (version,) = [part.version for part in pin.specifier]
        assert str(pin.specifier) == f"=={version}"
        assert ranges[pin.name].contains(version), pin.name


# --- the project's own machinery


def test_make_says_which_python_is_needed_when_the_given_one_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python"
    patched = "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{patched}" "$2"\n', encoding="utf-8")
    old.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", "--no-print-directory", "-C", str(ROOT), "test", f"PYTHON={old}", f"VENV={venv}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "error: Python 3.10 is too old, 3.11 or newer is needed." in result.stderr
    assert not venv.exists()


def test_make_installs_once_and_again_when_a_dependency_changes(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)

    def planned() -> str:
        command = ["make", "--dry-run", "--no-print-directory", "-C", str(tmp_path), "test"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "pip install" in planned()
    (tmp_path / ".venv").mkdir()
    stamp = tmp_path / ".venv" / ".installed"
    stamp.touch()
    assert "pip install" not in planned()
    assert "-m 'not slow'" in planned()
    past = stamp.stat().st_mtime - 60
    os.utime(stamp, (past, past))
    assert "pip install" in planned()


@pytest.fixture(scope="module")
def check_skips() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_skips", ROOT / ".ci" / "check_skips.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report_with_a_skip(tmp_path: Path) -> Path:
    """A report that pytest itself wrote: one test passed, one skipped with a reason."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\n@pytest.mark.skip(reason='no GPU')\ndef test_gpu(): pass\n",
        encoding="utf-8",
    )
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-c",
        "/dev/null",
    ]
    subprocess.run([*command, f"--junitxml={report}", "test_some.py"], cwd=tmp_path, check=True, capture_output=True)
    return report


def test_a_skip_that_is_not_on_the_list_fails_a_ci_run(
    check_skips: ModuleType, report_with_a_skip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("# none\n", encoding="utf-8")
    assert check_skips.main([str(allowed), str(report_with_a_skip)]) == 1
    assert "test_some::test_gpu was skipped (no GPU)" in capsys.readouterr().out
    allowed.write_text("test_some::test_gpu  # needs a GPU\n", encoding="utf-8")
    assert check_skips.main([str(allowed), str(report_with_a_skip)]) == 0
    assert check_skips.main([str(allowed), str(tmp_path / "missing.xml")]) == 1


def test_every_allowed_skip_says_why() -> None:
    for line in (ROOT / ".ci" / "allowed-skips.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            assert line.partition("#")[2].strip(), line


ACCELERATE = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_every_accelerate_config_is_accepted_by_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(path))
    kind, machines, processes, cpu = {
        "one_gpu": (DistributedType.NO, 1, 1, False),
        "multi_gpu": (DistributedType.MULTI_GPU, 1, 8, False),
        "multi_node": (DistributedType.MULTI_GPU, 2, 16, False),
        "tpu": (DistributedType.XLA, 1, 8, False),
        "cpu": (DistributedType.NO, 1, 1, True),
    }[path.stem]
    assert (config.distributed_type, config.num_machines, config.num_processes) == (kind, machines, processes)
    assert config.use_cpu is cpu
    assert config.mixed_precision == "no"  # a run's own config decides
    assert config.machine_rank == 0
    if machines > 1:
        assert config.rdzv_backend == "static"  # c10d would ignore the rank and the address of machine 0
    assert (config.downcast_bf16, config.debug) == (False, False)


def test_the_accelerate_configs_are_all_there() -> None:
    assert {path.stem for path in ACCELERATE} == {"one_gpu", "multi_gpu", "multi_node", "tpu", "cpu"}
