"""What one shell task is made of, before it is written to a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from thundersyncrl.environments.shell_tasks import checks
from thundersyncrl.environments.shell_tasks.words import Draw

Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: Final[tuple[Difficulty, ...]] = ("easy", "medium", "hard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A world, what is asked of the agent in it, the proof that it was done, and two ways to act in it.

    Paths are relative to the agent's working folder.
    """

    instruction: str
    commands: tuple[str, ...]
    """The oracle's commands, one a turn. More than one: the first ones only look."""
    checks: tuple[str, ...]
    """Bash conditions (see `checks`) that all hold once the task is done."""
    cheat: str
    """A plausible shortcut; it must not pass."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    folders: tuple[str, ...] = ()
    """Folders that would be empty."""
    modes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Permissions of files that don't have 644."""
    changed: tuple[str, ...] = ()
    """Files, or folders with all in them, that the agent may change; every other file must stay as it was."""
    hidden: tuple[str, ...] = ()
    """What can only be known by looking; never in the instruction."""
    repository: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """What the working folder's `.git` holds; empty without version control."""
    image: str = "debian:12"
    """What the Dockerfile starts from."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of every command."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """`checks`, and that nothing else was damaged."""
        kept = {
            path: content
            for path, content in self.files.items()
            if not any(path == free or path.startswith(f"{free}/") for free in self.changed)
        }
        return (*self.checks, *(checks.holds(path, content) for path, content in kept.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellTask:
    """One scene of a kind."""

    kind: str
    difficulty: Difficulty
    scene: Scene

    @property
    def several_turns(self) -> bool:
        """True when the task can't be solved without looking first."""
        return len(self.scene.commands) > 1

    @property
    def actions(self) -> list[str]:
        """The oracle's transcript, as the texts that a model would write.

        Example:
            >>> scene = Scene(instruction="Make a folder red.", commands=("mkdir red",), checks=(), cheat="")
            >>> ShellTask(kind="make", difficulty="easy", scene=scene).actions
            ['```bash\\nmkdir red\\n```\\nDONE']
        """
        blocks = [f"```bash\n{command}\n```" for command in self.scene.commands]
        return [*blocks[:-1], f"{blocks[-1]}\nDONE"]


Variant = Callable[[Draw], Scene]
Kind = Mapping[Difficulty, tuple[Variant, ...]]
"""One family of tasks: the variants that each difficulty draws from."""
