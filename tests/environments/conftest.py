"""Fixtures of worlds, in the two ways in which they are limited."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments.cgroup import Controllers
from thundersyncrl.environments.isolation import Isolation, detect
from thundersyncrl.environments.limits import Limits
from thundersyncrl.environments.sandbox import CommandResult, Sandbox


def only_rlimits(isolation: Isolation) -> Isolation:
    """Return the same without control groups and mounts, as on a machine where neither may be used."""
    return dataclasses.replace(isolation, controllers=Controllers(version=0), has_tmpfs=False)


@pytest.fixture(params=["all that this machine gives", "only rlimits"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    found = detect()
    return found if request.param != "only rlimits" else only_rlimits(found)


@pytest.fixture
def limits() -> Limits:
    settings = EnvironmentConfig(command_limit_s=20.0, memory_mb=128, max_processes=32, disk_mb=8)
    return Limits.from_settings(settings)


@pytest.fixture
def sandbox(isolation: Isolation, limits: Limits) -> Iterator[Sandbox]:
    world = Sandbox(isolation, limits=limits)
    world.open()
    yield world
    world.close()


@pytest.fixture
def run(sandbox: Sandbox, limits: Limits) -> Callable[..., CommandResult]:
    """Run one command to its end; keywords replace limits."""

    def run_command(command: str, **changes: float) -> CommandResult:
        return asyncio.run(sandbox.run(command, limits=dataclasses.replace(limits, **changes)))

    return run_command
