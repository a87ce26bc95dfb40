"""The limits of one world and of one command in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from thundersyncrl.config import EnvironmentConfig

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a command may use. Memory and disk hold for the whole world, the rest for each command.

    Example:
        >>> limits = Limits.from_settings(EnvironmentConfig(memory_mb=256))
        >>> limits.memory_bytes, limits.at_most(wall_s=1.0).wall_s
        (268435456, 1.0)
    """

    wall_s: float
    cpu_s: float
    """CPU seconds of all processes of a command together, where they can be counted; else of each process."""
    memory_bytes: int
    max_processes: int
    disk_bytes: int
    output_chars: int
    """Longer output is cut in the middle before anybody sees it."""
    max_output_bytes: int = 256 * MEGABYTE
    """A command that prints more than this is killed; up to here output is read and left out."""

    @classmethod
    def from_settings(cls, settings: EnvironmentConfig) -> Limits:
        """Return the limits of an agent's command."""
        return cls(
            wall_s=settings.command_limit_s,
            cpu_s=settings.cpu_limit_s,
            memory_bytes=settings.memory_mb * MEGABYTE,
            max_processes=settings.max_processes,
            disk_bytes=settings.disk_mb * MEGABYTE,
            output_chars=settings.output_chars,
        )

    def at_most(
        self, *, wall_s: float = math.inf, memory_bytes: float = math.inf, disk_bytes: float = math.inf
    ) -> Limits:
        """Return the limits with each given one lowered, never raised."""
        return replace(
            self,
            wall_s=min(self.wall_s, wall_s),
            memory_bytes=int(min(self.memory_bytes, memory_bytes)),
            disk_bytes=int(min(self.disk_bytes, disk_bytes)),
        )

    def for_verifier(self, wall_s: float) -> Limits:
        """Return the limits of a verifier: its own wall time, and as much CPU time as that allows one core."""
        return replace(self, wall_s=wall_s, cpu_s=max(self.cpu_s, wall_s))
