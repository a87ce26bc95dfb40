"""What can be checked before a model is loaded: algorithm, sandbox, tasks, chat template; and whether oracles work."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thundersyncrl.algorithms.estimator import get_estimator
from thundersyncrl.algorithms.weights import choose_normalizer
from thundersyncrl.build import refuse_without_effect
from thundersyncrl.config import Config, EnvironmentConfig
from thundersyncrl.environments.shell import check_sandbox, run_oracle
from thundersyncrl.errors import ConfigError, ThunderSyncError
from thundersyncrl.records import Task
from thundersyncrl.task_sets import task_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    ok: bool
    detail: str

    def line(self) -> str:
        """Return it as text, further lines indented.

        Example:
            >>> print(Finding(name="tasks", ok=True, detail="train: 8\\nheld-out: 4").line())
            ok    tasks: train: 8
                    held-out: 4
        """
        first, *more = self.detail.split("\n")
        mark = "ok  " if self.ok else "FAIL"
        return "\n".join([f"{mark}  {self.name}: {first}", *(f"        {line}" for line in more)])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_run(config: Config) -> list[Finding]:
    """Return a finding for each thing that a run of this config relies on; a failed one gives the reason."""
    return [
        _finding("algorithm", lambda: _algorithm(config)),
        _finding("sandbox", check_sandbox),
        _finding("tasks", lambda: _tasks(config)),
        _finding("chat template", lambda: _chat_template(config)),
    ]


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, ok=True, detail=check())
    except ThunderSyncError as error:
        return Finding(name=name, ok=False, detail=str(error))


def _algorithm(config: Config) -> str:
    estimator = get_estimator(config.algorithm.estimator)
    refuse_without_effect(config, estimator)
    normalizer = choose_normalizer(
        estimator.normalizer,
        name=config.algorithm.normalizer,
        constant_length=config.algorithm.constant_length,
        longest=config.rollout.max_action_tokens,
    )
    return f"{estimator.name} (coefficients {estimator.coefficient}, normalizer {normalizer.name})"


def _tasks(config: Config) -> str:
    with tempfile.TemporaryDirectory(prefix="thundersyncrl-check-") as scratch:
        train = task_set(config, "train", Path(scratch), announce=lambda _: None)
        heldout = task_set(config, "heldout", Path(scratch), announce=lambda _: None)
        trained = {_content(task) for task in train}
        shared = [task.id for task in heldout if _content(task) in trained]
    if shared:
        raise ConfigError(
            f"expected held-out tasks that aren't trained on, got {len(shared)} that are in both folders, such as "
            f"{shared[0]!r}; take them out of `tasks.train` or `tasks.heldout`"
        )
    return f"train: {describe_tasks(train)}\nheld-out: {describe_tasks(heldout)}"


def _content(task: Task) -> str:
    """Return a hash of what the agent is given: instruction and starting files. Names of folders don't count."""
    sha = hashlib.sha256(task.instruction.encode())
    if task.folder is not None:
        environment = task.folder / "environment"
        for path in sorted(environment.rglob("*")):
            sha.update(str(path.relative_to(environment)).encode())
            sha.update(path.read_bytes() if path.is_file() else b"")
    return sha.hexdigest()


def describe_tasks(tasks: Sequence[Task]) -> str:
    """Return how many tasks there are, by kind.

    Example:
        >>> describe_tasks([Task(id="a", instruction="", kind="git"), Task(id="b", instruction="", kind="git")])
        '2 tasks (git 2), 0 of them need several turns'
    """
    kinds = Counter(task.kind or "no kind" for task in tasks)
    several = sum(task.several_turns for task in tasks)
    by_kind = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    return f"{len(tasks)} tasks ({by_kind}), {several} of them need several turns"


def _chat_template(config: Config) -> str:
    from transformers import AutoTokenizer

    from thundersyncrl.learner.bundled import resolve_model_path
    from thundersyncrl.rollout.renderer import Renderer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(config.model.path))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"expected a tokenizer at `model.path`, got {config.model.path!r}: {reason}") from error
    renderer = Renderer(tokenizer)
    turn = renderer.prompt("system", "user")
    return f"{config.model.path}: {len(turn)} tokens for a short prompt, stop ids {sorted(renderer.stop_ids)}"


def check_oracles(tasks: Sequence[Task], settings: EnvironmentConfig, progress: Callable[[int], None]) -> list[Finding]:
    """Return, for each task, whether its own solution gets reward 1 in the sandbox.

    Args:
        progress: hears the number of tasks done.
    """
    return asyncio.run(_run_oracles(tasks, settings, progress))


async def _run_oracles(
    tasks: Sequence[Task], settings: EnvironmentConfig, progress: Callable[[int], None]
) -> list[Finding]:
    room, done = asyncio.Semaphore(settings.max_open), 0

    async def one(task: Task) -> Finding:
        nonlocal done
        async with room:
            try:
                reward = (await run_oracle(task, settings)).value
                finding = Finding(name=task.id, ok=reward >= 1.0, detail=f"reward {reward:g} for its own solution")
            except ThunderSyncError as error:
                finding = Finding(name=task.id, ok=False, detail=str(error))
        done += 1
        progress(done)
        return finding

    return list(await asyncio.gather(*(one(task) for task in tasks)))
