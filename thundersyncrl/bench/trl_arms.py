"""The arms of `bench trl` in turn: TRL's trainer, and our training loop over its two processes.

| who            | waits for                | released by                        |
| -------------- | ------------------------ | ---------------------------------- |
| an arm         | its turn                 | the other, at the end of its step  |
| `side_by_side` | every step of both arms  | the arms, or a worker that failed  |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Self

from thundersyncrl.bench.trl_peer import TrlArm
from thundersyncrl.bench.trl_workload import Setup, Step, measured, worlds
from thundersyncrl.build import Parts, placement_of, setting_of, takes_turns
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.learner.policy import load_tokenizer
from thundersyncrl.loop import Training, publish, train_step
from thundersyncrl.observe.events import NoEvents
from thundersyncrl.observe.tee import Tee
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.runtime.processes import ProcessRuntime, RemoteEngine, RemoteTransport
from thundersyncrl.runtime.trainer import Trainer


class OurArm:
    """Our loop over an engine and a learner; idle between its steps."""

    def __init__(self, setup: Setup, parts: Parts, processes: ProcessRuntime):
        self._setup = setup
        self._parts = parts
        self.processes = processes

    @classmethod
    async def start(cls, setup: Setup) -> Self:
        """Start the processes and make the first version live.

        Raises:
            ConfigError: there is a GPU that isn't hidden.
            WorkerError: a process ended.
        """
        config = setup.config()
        is_elastic = placement_of(config) == "elastic"
        processes = await ProcessRuntime.start(config, num_threads=setup.num_threads, elastic=is_elastic)
        parts = Parts(
            config=config,
            renderer=Renderer(load_tokenizer(config.model)),
            environments=worlds(setup.work),
            engine=RemoteEngine(processes.engine, context_tokens=config.rollout.context_tokens),
            trainer=Trainer(RemoteTransport(processes.learner), takes_turns=takes_turns(config)),
            runtime=processes,
            train_tasks=[],
            heldout_tasks=[],
            observer=Tee(),
            events=NoEvents(),
        )
        return cls(setup, parts, processes)

    async def publish_first(self) -> None:
        """Make the first version live."""
        await self._parts.trainer.begin_version(0)
        await publish(self._training(0))

    async def step(self, number: int) -> Step:
        """Take the next step; raises ContractError where trajectories didn't take their turns."""
        training = self._training(number)
        started = time.perf_counter()
        report = await train_step(training, number)
        return measured(
            self._setup,
            "ours",
            number,
            seconds=time.perf_counter() - started,
            num_trained=report.num_trained,
            num_tokens=round(report.metrics["num_action_tokens"]),
            turns=report.metrics["turns_mean"],
        )

    def _training(self, number: int) -> Training:
        work, parts = self._setup.work, self._parts
        return Training(
            setting=setting_of(parts, temperature=1.0, seed=work.seed),
            trainer=parts.trainer,
            tasks=TaskOrder(self._setup.tasks(number), seed=work.seed),
            observer=parts.observer,
            groups_per_step=work.num_groups,
            group_size=work.group_size,
        )


async def side_by_side(setup: Setup, heard: Callable[[Step], None]) -> list[Step]:
    """Return the steps of both arms of one workload, without those that warmed up.

    Args:
        setup: what is run.
        heard: told of each step, warm-up too.

    Raises:
        WorkerError: a process ended.
        ContractError: an arm did other work than it was given.
    """
    peer = TrlArm(setup)
    try:
        ours = await OurArm.start(setup)
        body = asyncio.ensure_future(_take_turns(setup, peer, ours, heard))
        server = asyncio.ensure_future(ours.processes.serve())
        try:
            done, _ = await asyncio.wait({body, server}, return_when=asyncio.FIRST_COMPLETED)
            if server in done:
                server.result()  # raises why a worker ended
            return body.result()
        finally:
            peer.close()  # first, or the thread that waits for its answer never ends
            for task in (body, server):
                task.cancel()
            await asyncio.gather(body, server, return_exceptions=True)
            await ours.processes.close()
    finally:
        peer.close()


async def _take_turns(setup: Setup, peer: TrlArm, ours: OurArm, heard: Callable[[Step], None]) -> list[Step]:
    await peer.start()
    await ours.publish_first()
    steps: list[Step] = []
    for number in range(1 + setup.num_steps):
        # who is first changes, so that no arm always runs on a machine that the other has warmed or tired
        for arm in (peer, ours) if number % 2 else (ours, peer):
            steps.append(await arm.step(number))
            heard(steps[-1])
    return [step for step in steps if step.number]
