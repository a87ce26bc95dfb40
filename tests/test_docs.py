"""What the pages state about names, links and files is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thundersyncrl.algorithms.estimator import estimator_names, get_estimator
from thundersyncrl.environments.shell_tasks import KINDS
from thundersyncrl.runtime.run_folder import MAY_DIFFER, RunFolder

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []


def test_the_readmes_tree_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("## The tree")[2].partition("## Licence")[0]
    there = {path.name for path in (ROOT / "thundersyncrl").iterdir() if path.name[0] not in "_."}
    named = set(re.findall(r"\b(\w+\.py|\w+(?=/))", tree))
    assert there <= named
    assert {name for name in named if name.endswith(".py")} <= there


def test_every_estimator_has_its_row() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", page, re.MULTILINE))
    own = [name for name in estimator_names() if not name.startswith("test_")]  # other tests register theirs
    estimators = [get_estimator(name) for name in own]
    assert {(e.name, e.coefficient.value, e.normalizer) for e in estimators} <= rows


def test_every_kind_of_task_is_named() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    named = page.partition("Kinds: ")[2].partition(";")[0].replace("\n", " ").split(", ")
    assert [name.strip() for name in named] == sorted(KINDS)


def test_every_part_of_the_run_folder_is_named() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    folder = RunFolder(Path("run"))
    parts = (folder.config, folder.metrics, folder.transcripts, folder.checkpoints, folder.curves, folder.tasks)
    parts = (*parts, folder.events, folder.trackers, folder.report)
    for part in (*parts, folder.summary):
        assert f"| `{part.name}" in page
    for key in MAY_DIFFER:
        assert f"`{key}`" in page
