"""The order of the house: imports go down only, light modules stay light, names shadow nothing, modules stay short."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_tinylm"

# From the top down; a module may import from its own row's own part and from any row below.
LAYERS = (
    ("recipes", "tokenizer", "eval"),
    ("cli", "commands", "demo"),
    ("preflight", "evaluation", "export", "monitor"),
    ("training",),
    ("data", "modeling"),
    ("tokenization",),
    ("contract", "config", "config_files", "sections", "planning", "values", "gguf_plan"),
    ("files", "locks", "model_folder", "errors"),
)
LEVEL_OF = {part: level for level, row in enumerate(LAYERS) for part in row}
ONE_LAYER = {
    "cli",
    "commands",
    "demo",
    "contract",
    "config",
    "config_files",
    "sections",
    "planning",
    "values",
    "gguf_plan",
    "files",
    "locks",
    "model_folder",
    "errors",
}  # may import within
LIGHT = (
    *("__init__", "cli", "config", "config_files", "sections", "values", "gguf_plan", "planning", "contract", "files"),
    *("locks", "errors"),
)
HEAVY = {"torch", "transformers", "datasets", "accelerate", "tokenizers", "tiktoken", "pyarrow", "gguf", "evaluate"}

MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for folder in ("recipes", "tokenizer", "eval") for path in (ROOT / folder).rglob("*.py"))
EACH_FILE = pytest.mark.parametrize("path", MODULES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))


def part_of(path: Path) -> str:
    """The part of the house that a file belongs to: `data` for hf_tinylm/data/windows.py, `recipes` for a recipe."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return names[1] if names[0] == "hf_tinylm" else names[0]


def statements(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """Every node, or only those that run when the module is imported; `if TYPE_CHECKING:` never runs."""
    for child in ast.iter_child_nodes(tree):
        if not inside_functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from statements(child, inside_functions)


def imported_names(path: Path, inside_functions: bool = True) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of what a file imports, as `hf_tinylm.data.windows` or `torch.nn`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), inside_functions):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *((node.module,) if node.module else ())))
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def imported_parts(path: Path) -> Iterator[tuple[str, int]]:
    """(part of the house, line) of each import of our own; names that the package itself offers are no part."""
    for name, line in imported_names(path):
        first, *rest = name.split(".")
        if first == "hf_tinylm" and rest and ((PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").is_file()):
            yield rest[0], line


def forbidden_imports(path: Path) -> list[str]:
    """What a file imports from its own row or from above, as readable lines."""
    part = part_of(path)
    wrong = []
    for target, line in imported_parts(path):
        below = LEVEL_OF[target] > LEVEL_OF[part]
        beside = LEVEL_OF[target] == LEVEL_OF[part] and part in ONE_LAYER and target in ONE_LAYER
        if not (below or beside or target == part):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} must not import {target}")
    return wrong


def test_every_part_of_the_house_has_a_layer() -> None:
    parts = {part_of(path) for path in MODULES + SCRIPTS} - {"__init__"}
    assert parts <= set(LEVEL_OF), f"give {parts - set(LEVEL_OF)} a row in LAYERS"


@EACH_FILE
def test_imports_go_down_only(path: Path) -> None:
    if part_of(path) != "__init__":  # the package's own names load on first use
        assert forbidden_imports(path) == []


@pytest.mark.parametrize(
    ("home", "line", "allowed"),
    [
        ("data/new.py", "from ..modeling.loss import x", False),
        ("data/new.py", "from .. import modeling", False),
        ("data/new.py", "import hf_tinylm.modeling.loss", False),
        ("modeling/new.py", "def f():\n    from hf_tinylm.data.windows import x", False),
        ("tokenization/new.py", "from ..data.shards import x", False),
        ("training/new.py", "from ..evaluation.sampling import x", False),
        ("evaluation/new.py", "from ..export.gguf import x", False),
        ("errors.py", "from .config import x", False),
        ("training/new.py", "from ..data.windows import x\nfrom ..errors import y\nfrom . import schedule", True),
        ("config.py", "from .values import x", True),
        ("cli.py", "from .export.gguf import x", True),
    ],
)
def test_the_check_itself_sees_an_import_that_goes_up(home: str, line: str, allowed: bool) -> None:
    class Draft(type(ROOT)):  # type: ignore[misc]
        def read_text(self, *args: object, **kwargs: object) -> str:
            return line

    assert (forbidden_imports(Draft(PACKAGE / home)) == []) is allowed


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    """Only imports that run when a module is imported count."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in MODULES}

    def home_of(name: str) -> str | None:
        return next((n for n in (name, name.rpartition(".")[0]) if n in names and n != "hf_tinylm"), None)

    graph = {n: {home_of(i) for i, _ in imported_names(p, False)} - {None, n} for n, p in names.items()}
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"modules in a circle: {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy_when_they_are_imported(name: str) -> None:
    module = PACKAGE / f"{name}.py"
    paths = [module] if module.exists() else sorted((PACKAGE / name).glob("*.py"))
    assert paths
    heavy = {found.split(".")[0] for path in paths for found, _ in imported_names(path, inside_functions=False)} & HEAVY
    assert heavy == set()


def test_light_modules_load_nothing_heavy_through_each_other() -> None:
    names = [f"hf_tinylm.{name}" for name in LIGHT if name not in ("__init__", "planning")]
    names += [f"hf_tinylm.planning.{path.stem}" for path in (PACKAGE / "planning").glob("*.py")]
    code = f"import {', '.join(names)}, sys; print(*(set({sorted(HEAVY)}) & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_no_file_that_can_be_run_is_named_after_a_dependency() -> None:
    """The folder of a script comes first on the import path: its files would be imported in the dependency's place."""
    requirements = importlib.metadata.requires("hf-tinylm") or []
    projects = {re.split(r"[\s<>=!~;\[(]", requirement)[0].lower() for requirement in requirements}
    taken = {name.replace("-", "_") for name in projects} | {"yaml", "evaluate", "trackio", "huggingface_hub"}
    assert {"torch", "gguf", "pytest"} <= taken
    runnable = {path.stem for path in [*SCRIPTS, *PACKAGE.glob("*.py")]}
    assert not runnable & (taken | set(sys.stdlib_module_names))


@EACH_FILE
def test_no_file_is_longer_than_a_reader_holds_in_mind(path: Path) -> None:
    limit = 100 if path.parent == ROOT / "recipes" else 450
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_there_is_no_module_for_everything_else() -> None:
    names = {path.stem for path in MODULES + SCRIPTS}
    assert not names & {"utils", "util", "helpers", "helper", "misc", "common"}
