"""Oracle transcripts: a task's own solution, acted out in its real environment, as a trajectory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from thundersyncrl.environments.environment import Environment, EnvironmentFactory
from thundersyncrl.errors import TaskError
from thundersyncrl.records import Outcome, Status, Task, Trajectory, TrajectoryId, Turn
from thundersyncrl.rollout.boundary import within
from thundersyncrl.rollout.renderer import Renderer


async def oracle_transcript(
    task: Task,
    renderer: Renderer,
    environment_factory: EnvironmentFactory,
    *,
    id: TrajectoryId,
    version: int,
    limit_s: float = 300.0,
) -> Trajectory:
    """Return the oracle's trajectory, rendered and masked as a sampled one is.

    Its actions are the texts of the task's `solution/turns.json`, each with the end of turn after it; what
    the agent sees is what the environment really answers. Nothing was sampled, so behavior log-probs are 0.

    Args:
        id: identity for the trajectory.
        version: policy version that it will be trained at.
        limit_s: wall time of the whole, verifier included.

    Raises:
        TaskError: no readable `turns.json`; an action that the environment can't read, or that tokens can't
            spell; an oracle that ends early or late; a verdict other than 1.
        TimeLimitError: not done within `limit_s`.
        RolloutError: the environment failed.
    """
    actions = _actions(task)
    environment = environment_factory(task)
    try:
        turns, messages = await within(
            _act_out(task, actions, renderer, environment, version),
            limit_s=limit_s,
            what=f"the oracle of task {task.id}",
        )
    finally:
        await environment.close()
    return Trajectory(
        id=id,
        task=task,
        turns=turns,
        outcome=Outcome(status=Status.COMPLETED),
        messages=messages,
        metrics={"num_turns": len(turns), "num_action_tokens": sum(len(turn.action_ids) for turn in turns)},
    )


async def _act_out(
    task: Task, actions: list[str], renderer: Renderer, environment: Environment, version: int
) -> tuple[tuple[Turn, ...], tuple[dict[str, str], ...]]:
    await environment.open()
    observation_ids = renderer.prompt(environment.system_prompt, task.instruction)
    messages = [
        {"role": "system", "content": environment.system_prompt},
        {"role": "user", "content": task.instruction},
    ]
    turns: list[Turn] = []
    for number, action in enumerate(actions, start=1):
        action_ids = renderer.action(action)
        where = f"task {task.id}, turn {number} of {len(actions)}: {action!r}"
        if renderer.text(action_ids) != action:
            raise TaskError(f"expected an action that tokens can spell, got {renderer.text(action_ids)!r} ({where})")
        observation = await environment.act(action)
        if observation.is_malformed:
            raise TaskError(f"expected an action that the environment reads, got {observation.text!r} ({where})")
        if observation.done != (number == len(actions)):
            raise TaskError(
                f"expected the oracle to be done after its last action only, got done={observation.done} "
                f"({where}); end the last action of `solution/turns.json`, and no other, with DONE"
            )
        turns.append(
            Turn(
                observation_ids=observation_ids,
                action_ids=action_ids,
                behavior_logprobs=(0.0,) * len(action_ids),
                version=version,
            )
        )
        messages.append({"role": "assistant", "content": action})
        if not observation.done:
            messages.append({"role": "user", "content": observation.text})
            observation_ids = renderer.suffix(observation.text, last_id=action_ids[-1])
    reward = await environment.grade()
    if reward.value != 1.0:
        raise TaskError(
            f"expected the oracle to get reward 1, got {reward.value} (task {task.id}); mend its solution or "
            "its verifier"
        )
    return tuple(turns), tuple(messages)


def _actions(task: Task) -> list[str]:
    if task.folder is None:
        raise TaskError(f"expected a task folder with `solution/turns.json`, got a task without folder ({task.id})")
    path = Path(task.folder) / "solution" / "turns.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"expected the oracle's actions as a JSON list of strings, got {error} ({path})") from error
    if not isinstance(found, list) or not found:
        raise TaskError(f"expected the oracle's actions as a JSON list of strings, got {found!r} ({path})")
    actions = cast(list[object], found)
    if not all(isinstance(action, str) and action for action in actions):
        raise TaskError(f"expected every action of the oracle to be a text, got {actions!r} ({path})")
    return cast(list[str], actions)
