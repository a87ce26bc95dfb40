"""All kinds of shell tasks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from thundersyncrl.environments.shell_tasks.archives import ARCHIVES
from thundersyncrl.environments.shell_tasks.copying import COPY
from thundersyncrl.environments.shell_tasks.counting import COUNT, SEARCH
from thundersyncrl.environments.shell_tasks.deleting import DELETE
from thundersyncrl.environments.shell_tasks.git import GIT
from thundersyncrl.environments.shell_tasks.looking import NOTES, PICK, READING
from thundersyncrl.environments.shell_tasks.making import MAKE, WRITE
from thundersyncrl.environments.shell_tasks.moving import MOVE
from thundersyncrl.environments.shell_tasks.permissions import PERMISSIONS
from thundersyncrl.environments.shell_tasks.scene import Kind
from thundersyncrl.environments.shell_tasks.scripts import FIX, REPAIR
from thundersyncrl.environments.shell_tasks.tables import CSV, JSON
from thundersyncrl.environments.shell_tasks.text import TEXT

KINDS: Final[Mapping[str, Kind]] = {
    "archives": ARCHIVES,
    "copy": COPY,
    "count": COUNT,
    "csv": CSV,
    "delete": DELETE,
    "fix": FIX,
    "git": GIT,
    "json": JSON,
    "make": MAKE,
    "move": MOVE,
    "notes": NOTES,
    "permissions": PERMISSIONS,
    "pick": PICK,
    "reading": READING,
    "repair": REPAIR,
    "search": SEARCH,
    "text": TEXT,
    "write": WRITE,
}

QUICKSTART_KINDS: Final = (
    "copy",
    "delete",
    "make",
    "move",
    "notes",
    "permissions",
    "pick",
    "reading",
    "write",
)
"""What a model of 135 M parameters learns in minutes: short instructions, short commands, plain names."""
