"""A damaged checkpoint is named, whatever its damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunSpec, run_tiny
from thundersyncrl.errors import ConfigError

FILES = ("trained.safetensors", "optimizer.pt", "progress.json")
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "gone": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "foreign": lambda file: file.write_text('{"a": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    run_tiny(RunSpec(steps=1, checkpoint_after=1, folder=tmp_path))
    checkpoint = tmp_path / "step-000001"
    for name in FILES:
        whole = (checkpoint / name).read_bytes()
        DAMAGE[damage](checkpoint / name)
        with pytest.raises(ConfigError, match=rf"damaged one \({checkpoint}\)"):
            run_tiny(RunSpec(steps=2, first_step=1, folder=tmp_path))
        (checkpoint / name).write_bytes(whole)
    assert len(run_tiny(RunSpec(steps=2, first_step=1, folder=tmp_path)).recorder.reports) == 1
