"""`bench learner`: busy CPU seconds of one step's gradient, ours by stream level against plain transformers.

| arm          | what it is                                                                              |
| ------------ | --------------------------------------------------------------------------------------- |
| padded       | plain transformers, one padded group a micro-batch                                      |
| packed       | whole trajectories side by side, no padding, scored positions only, prompts not shared  |
| final        | ours when every reward is in before any work                                            |
| group        | ours, each group's gradient when it is complete                                         |
| trajectory   | ours, each trajectory's gradient as it ends, in random order                            |
| turn         | ours, each trajectory's turns handed over one at a time, in random order                |
| half_uniform | final, with equal rewards in every other group                                          |

Arms are interleaved; figures are medians over the repetitions. Each reward lands right after its text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from thundersyncrl.bench.options import parser_of, positive, print_figures

if TYPE_CHECKING:
    from torch import Tensor

    from thundersyncrl.bench.learner_workload import Item
    from thundersyncrl.learner.learner import Learner
    from thundersyncrl.learner.policy import Policy

ARMS = ("padded", "packed", "final", "group", "trajectory", "turn", "half_uniform")
RATIOS = {"final": "packed", "group": "packed", "trajectory": "packed", "turn": "packed", "half_uniform": "final"}
"""Arm -> the arm that it is divided by."""
EARLY_TOKENS = 1 << 15
"""Graph budget: room for every live trajectory of the workload, so that each finished turn runs early."""
_EXAMPLE = "example:\n  thundersyncrl bench learner --repetitions 5 --json > learner.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; return the exit code."""
    options = _parser().parse_args(argv)
    figures = measure(
        groups=options.groups,
        repetitions=options.repetitions,
        threads=options.threads,
        arms=options.arms or ARMS,
        last_observation=not options.no_last_observation,
    )
    print_figures(_table(figures), figures, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("learner", "Measure the learner's busy CPU seconds per step by stream level.", _EXAMPLE)
    parser.add_argument("--repetitions", type=positive, default=5, help="timed rounds over all arms")
    parser.add_argument("--threads", type=positive, default=1, help="compute threads")
    parser.add_argument("--groups", type=positive, default=8, help="groups of 8 trajectories")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these arms")
    parser.add_argument(
        "--no-last-observation",
        action="store_true",
        help="end every trajectory with an action: packed then has no tail that no scored token reads",
    )
    return parser


def measure(
    *, groups: int, repetitions: int, threads: int, arms: Sequence[str] = ARMS, last_observation: bool = True
) -> dict[str, Any]:
    """Return `arms` (name -> median CPU seconds), `ratios`, and the rest under `details`.

    Args:
        groups: of 8 trajectories.
        repetitions: timed rounds; one more warms up.
        threads: of torch, while this runs.
        arms: names of `ARMS`.
        last_observation: let one follow the last action, as in the workload's definition.
    """
    import torch

    from thundersyncrl.bench import learner_workload as work
    from thundersyncrl.learner.policy import make_policy

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    items = work.make_items(groups, last_observation=last_observation)
    halved = work.half_uniform(items)
    plain, policy = work.make_model(), make_policy(work.make_model())
    run: dict[str, Callable[[], list[Tensor]]] = {
        "padded": lambda: work.padded_gradient(plain, items),
        "packed": lambda: work.packed_gradient(policy, items),
        "final": lambda: streamed(policy, items, "batch"),
        "group": lambda: streamed(policy, items, "group"),
        "trajectory": lambda: streamed(policy, items, "trajectory"),
        "turn": lambda: streamed(policy, items, "turn"),
        "half_uniform": lambda: streamed(policy, halved, "batch"),
    }
    exact = work.reference_gradient(items)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    errors: dict[str, float] = {}
    for repetition in range(repetitions + 1):  # the first warms up
        for name in arms:
            started = time.process_time()
            gradient = run[name]()
            if repetition:
                seconds[name].append(time.process_time() - started)
            if name != "half_uniform":  # its rewards, and so its gradient, are others
                errors[name] = work.relative_error(gradient, exact)
    torch.set_num_threads(before)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {n: medians[n] / medians[base] for n, base in RATIOS.items() if n in medians and base in medians}
    conditions = {"groups": groups, "threads": threads, "last_observation": last_observation}
    details = {"cpu_s": seconds, "errors": errors, **conditions, "torch": torch.__version__}
    return {"arms": medians, "ratios": ratios, "details": details}


class _Catch:
    """Stands where the optimizer stands, so that no arm's time holds it."""

    learning_rate = 0.0

    def __init__(self) -> None:
        self.gradient: list[Tensor] = []

    def ascend(self, gradient: Sequence[Tensor]) -> float:
        self.gradient = list(gradient)
        return 0.0


def streamed(policy: Policy, items: Sequence[Item], level: str) -> list[Tensor]:
    """Return the learner's gradient as the items arrive in a fixed random order, worked on at once."""
    from thundersyncrl.algorithms.estimator import get_estimator
    from thundersyncrl.algorithms.weights import Normalizer
    from thundersyncrl.learner.learner import Learner
    from thundersyncrl.learner.objective import Objective, WorkLimits

    catch = _Catch()
    learner = Learner(
        policy,
        Objective(estimator=get_estimator("grpo"), normalizer=Normalizer(name="token")),
        WorkLimits(stream=level, graph_tokens=EARLY_TOKENS if level == "turn" else WorkLimits().graph_tokens),
        cast(Any, catch),
    )
    learner.begin_step()
    for group in dict.fromkeys(t.id.group_id for t, _ in items):
        learner.open_group(group, [t.id for t, _ in items if t.id.group_id == group])
    learner.seal()
    draw, rewards = random.Random(1), _rewards_of(items)
    if level == "turn":
        _arrive_by_turn(learner, items, rewards, draw)
    else:
        for trajectory, reward in draw.sample(list(items), len(items)):
            learner.text(trajectory)
            learner.reward(trajectory.id, reward)
            _work(learner)
    learner.finish_step()
    return catch.gradient


def _rewards_of(items: Sequence[Item]) -> Mapping[Any, float]:
    """Return the rewards by trajectory."""
    return {t.id: reward for t, reward in items}


def _num_sampled(trajectory: Any) -> int:
    """Return the number of turns with an action."""
    return sum(bool(turn.action_ids) for turn in trajectory.turns)


def _arrive_by_turn(learner: Learner, items: Sequence[Item], rewards: Mapping[Any, float], draw: random.Random) -> None:
    """Hand over every sampled turn in a random interleaving; the text is complete after the last one."""
    waiting = {t.id: [t, 0] for t, _ in items}
    while waiting:
        id = draw.choice(list(waiting))
        trajectory, said = cast("tuple[Any, int]", tuple(waiting[id]))
        if said < _num_sampled(trajectory):
            learner.turn(id, trajectory.turns[: said + 1])
            waiting[id][1] = said + 1
        else:
            del waiting[id]
            learner.text(trajectory)
            learner.reward(id, rewards[id])
        _work(learner)


def _work(learner: Learner) -> None:
    while learner.has_work:
        learner.run_once()


def _table(figures: Mapping[str, Any]) -> str:
    cpu_s, errors = figures["details"]["cpu_s"], figures["details"]["errors"]
    lines = [f"{'arm':<14}{'CPU s':>8}{'min':>8}{'max':>8}{'ratio':>8}  {'to':<8}{'error':>9}"]
    for name, median in figures["arms"].items():
        ratio = f"{figures['ratios'][name]:.2f}" if name in figures["ratios"] else ""
        error = f"{errors[name]:.1e}" if name in errors else ""
        low, high = min(cpu_s[name]), max(cpu_s[name])
        to = RATIOS.get(name, "") if ratio else ""
        lines.append(f"{name:<14}{median:>8.2f}{low:>8.2f}{high:>8.2f}{ratio:>8}  {to:<8}{error:>9}")
    return "\n".join(lines)
