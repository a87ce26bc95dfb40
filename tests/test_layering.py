"""The layout: who may import whom, how long files and functions may be, and what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "thundersyncrl"

ROWS = (
    ("thundersyncrl.errors", "thundersyncrl.records"),
    ("thundersyncrl.observe.events",),
    (
        "thundersyncrl.config",
        "thundersyncrl.config_keys",
        "thundersyncrl.config_overrides",
        "thundersyncrl.config_toml",
    ),
    ("thundersyncrl.algorithms",),
    ("thundersyncrl.learner",),
    ("thundersyncrl.environments",),
    ("thundersyncrl.rollout",),
    ("thundersyncrl.runtime",),
    ("thundersyncrl.observe",),
    (
        "thundersyncrl.loop",
        "thundersyncrl.ahead",
        "thundersyncrl.warm_start",
        "thundersyncrl.evaluation",
        "thundersyncrl.task_sets",
    ),
    ("thundersyncrl.build",),
    ("thundersyncrl.runs", "thundersyncrl.worker"),
    ("thundersyncrl.certify", "thundersyncrl.check", "thundersyncrl.bench"),
    ("thundersyncrl.command_options",),
    ("thundersyncrl.report_command", "thundersyncrl.tasks_command", "thundersyncrl.bench_command"),
    ("thundersyncrl.cli",),
)
"""A module imports from the rows above its own, and within a package of its row. Names that share a row import each
other only as `SIBLINGS` says."""

SIBLINGS = {
    ("thundersyncrl.records", "thundersyncrl.errors"),
    ("thundersyncrl.config", "thundersyncrl.config_keys"),
    ("thundersyncrl.config", "thundersyncrl.config_overrides"),
    ("thundersyncrl.config_overrides", "thundersyncrl.config_keys"),
    ("thundersyncrl.ahead", "thundersyncrl.loop"),
}
"""(importer, imported)."""

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*MODULES, *sorted((ROOT / "scripts").rglob("*.py"))]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
HOMELESS = {"utils", "util", "common", "helpers", "helper", "misc", "shared"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def row_of(module: str) -> tuple[int, str]:
    """The row of a module, and the row's name that it falls under."""
    for index, names in enumerate(ROWS):
        for name in names:
            if module == name or module.startswith(name + "."):
                return index, name
    raise AssertionError(f"{module} is in no row; give it a place in ROWS and in the design's table")


def imports_of(path: Path) -> set[str]:
    """Every module of the package that a file imports, inside functions and for type checking too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the module in full"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
    return {name for name in found if name.split(".")[0] == "thundersyncrl"}


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring, which may take the room that it needs."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    taken = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - taken


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_its_own_row_and_those_above(path: Path) -> None:
    module = name_of(path)
    if module == "thundersyncrl":
        assert imports_of(path) == set(), "the package itself imports nothing, so that every part stays light"
        return
    row, own = row_of(module)
    for imported in imports_of(path):
        if imported == "thundersyncrl":
            continue  # its version
        other_row, other = row_of(imported)
        allowed = other_row < row or other == own or (own, other) in SIBLINGS
        assert allowed, f"{module} imports {imported}, which is not in a row above its own"


def test_every_row_has_a_module() -> None:
    missing = [name for names in ROWS for name in names if not is_module(name)]
    assert missing == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short_and_have_a_home(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert HOMELESS.isdisjoint(part.removesuffix(".py") for part in path.relative_to(ROOT).parts)
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {node.name: length for node in functions if (length := lines_of(node)) > MAX_FUNCTION_LINES}
    assert long == {}
    assert ast.get_docstring(tree), "a module begins by saying what its one job is"


@pytest.mark.parametrize(
    "code",
    [
        "import thundersyncrl",
        "import thundersyncrl.config",
        "import thundersyncrl.cli",
        "import thundersyncrl.observe.display, thundersyncrl.runtime.run_folder",
        "import thundersyncrl.algorithms.advantages",
        "import thundersyncrl.environments.harbor, thundersyncrl.environments.shell_tasks",
        "import sys; sys.argv = ['thundersyncrl', '--help']\n"
        "from thundersyncrl.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 0",
    ],
    ids=["package", "config", "cli", "observe", "algorithms", "environments", "help"],
)
def test_what_must_be_light_imports_nothing_heavy(code: str) -> None:
    heavy = {"torch", "transformers", "matplotlib", "peft"}
    code += f"\nimport sys\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
