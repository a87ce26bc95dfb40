"""Learner's busy CPU seconds: batch, group and trajectory streaming against plain padded and packed transformers.

Workload: 8 groups x 8 trajectories, prompt 256, three turns of 40-80 action and 40-80 observation tokens, a random
Qwen3 of 5.25 M parameters (4 layers, width 256, MLP 768, 4 query and 2 key/value heads of 64, vocabulary 4096,
untied), float32. Trajectories finish in one fixed random order; each reward lands right after its text.

Arms are interleaved; the median over the repetitions is reported. Run it with

    python benchmarks/learner.py --repetitions 5 --threads 1 --json out.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from thundersyncrl.algorithms.estimator import get_estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.learner.attention import Branch, PackPlan
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.policy import Policy, make_norms_exact, make_policy
from thundersyncrl.learner.scoring import token_logprobs
from thundersyncrl.records import GroupId, Outcome, Status, Task, Trajectory, TrajectoryId, Turn

VOCABULARY, GROUPS, GROUP_SIZE, PROMPT, TURNS = 4096, 8, 8, 256, 3
Item = tuple[Trajectory, float]


def make_model(attention: str = "sdpa"):
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def make_items(seed: int = 0) -> list[Item]:
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high)))

    items: list[Item] = []
    for group in range(GROUPS):
        prompt = tokens(PROMPT, PROMPT)
        for member in range(GROUP_SIZE):
            turns = []
            for turn in range(TURNS):
                observation, action = prompt if turn == 0 else tokens(40, 80), tokens(40, 80)
                turns.append(
                    Turn(
                        observation_ids=observation,
                        action_ids=action,
                        behavior_logprobs=(0.0,) * len(action),
                        version=0,
                    )
                )
            trajectory = Trajectory(
                id=TrajectoryId(0, group, member),
                task=Task(id=f"task-{group}", instruction=""),
                turns=tuple(turns),
                outcome=Outcome(status=Status.COMPLETED),
            )
            items.append((trajectory, rng.random()))
    return items


def advantages(items: Sequence[Item]) -> list[float]:
    """GRPO's advantages, group by group, in the items' order."""
    values: list[float] = []
    for start in range(0, len(items), GROUP_SIZE):
        rewards = [r for _, r in items[start : start + GROUP_SIZE]]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        values += [(r - mean) / (deviation + 1e-4) for r in rewards]
    return values


class Catch:
    """Stands for the optimizer, so that no arm's time holds it."""

    learning_rate = 0.0

    def ascend(self, gradient: Sequence[Tensor]) -> float:
        self.gradient = list(gradient)
        return 0.0


def stream(policy: Policy, items: Sequence[Item], level: str) -> list[Tensor]:
    """Ours, as trajectories end."""
    catch = Catch()
    learner = Learner(
        policy,
        Objective(estimator=get_estimator("grpo"), normalizer=Normalizer(name="token")),
        WorkLimits(stream=level),
        catch,  # type: ignore[arg-type]
    )
    arrivals = list(items)
    random.Random(1).shuffle(arrivals)
    learner.begin_step()
    for group in range(GROUPS):
        learner.open_group(GroupId(0, group), [t.id for t, _ in items if t.id.group == group])
    learner.seal()
    for trajectory, reward in arrivals:
        learner.text(trajectory)
        learner.reward(trajectory.id, reward)
        while learner.has_work:
            learner.run_once()
    learner.finish_step()
    return catch.gradient


def padded(model, items: Sequence[Item]) -> list[Tensor]:
    """Plain transformers: one group a micro-batch, right-padded, all logits."""
    model.zero_grad()
    coefficients = torch.tensor(advantages(items))
    for start in range(0, len(items), GROUP_SIZE):
        rows = [t for t, _ in items[start : start + GROUP_SIZE]]
        longest = max(len(t.token_ids) for t in rows)

        def fill(values: Sequence[float], width: int = longest) -> list[float]:
            return [*values, *[0] * (width - len(values))]

        ids = torch.tensor([fill(t.token_ids) for t in rows])
        seen = torch.tensor([fill([1] * len(t.token_ids)) for t in rows])
        mask = torch.tensor([fill([float(m) for m in t.action_mask]) for t in rows])[:, 1:]
        logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        logprobs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        (logprobs * mask * coefficients[start : start + GROUP_SIZE, None]).sum().backward()
    return _scaled_grads(model, items)


def packed(policy: Policy, items: Sequence[Item], budget: int = 2048) -> list[Tensor]:
    """Packed: whole trajectories side by side without padding, scored positions only, no shared prompt."""
    policy.model.zero_grad()
    coefficients = advantages(items)
    packs: list[list[int]] = [[]]
    for index, (trajectory, _) in enumerate(items):
        used = sum(len(items[i][0].token_ids) for i in packs[-1])
        if packs[-1] and used + len(trajectory.token_ids) > budget:
            packs.append([])
        packs[-1].append(index)
    for pack in packs:
        ids: list[int] = []
        positions: list[int] = []
        scored: list[int] = []
        weights: list[float] = []
        spans: list[Branch] = []
        for index in pack:
            trajectory, start = items[index][0], len(ids)
            tokens, mask = trajectory.token_ids, trajectory.action_mask
            ids += tokens
            positions += range(len(tokens))
            here = [start + i - 1 for i, sampled in enumerate(mask) if sampled]
            scored += here
            weights += [coefficients[index]] * len(here)
            spans.append(Branch(start=start, end=len(ids), prefix=None))
        hidden = policy.hidden(torch.tensor([ids]), torch.tensor([positions]), PackPlan(spans))[0]
        targets = torch.tensor(ids)[torch.tensor(scored) + 1]
        logprobs = token_logprobs(policy, hidden[torch.tensor(scored)], targets, 1.0)
        (logprobs * torch.tensor(weights, dtype=logprobs.dtype)).sum().backward()
    return _scaled_grads(policy.model, items)


def _scaled_grads(model, items: Sequence[Item]) -> list[Tensor]:
    count = sum(t.num_action_tokens for t, _ in items)
    return [p.grad.detach() / count for p in model.parameters()]


def reference(items: Sequence[Item]) -> list[Tensor]:
    """Float64, one trajectory at a time, plain transformers."""
    model = make_model().double()
    make_norms_exact(model)
    for (trajectory, _), coefficient in zip(items, advantages(items), strict=True):
        ids = torch.tensor([trajectory.token_ids])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        (coefficient * logprobs[torch.tensor(trajectory.action_mask[1:])].sum()).backward()
    return _scaled_grads(model, items)


def relative_error(gradient: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    difference = sum(float((g.double() - e).square().sum()) for g, e in zip(gradient, expected, strict=True))
    return (difference / sum(float(e.square().sum()) for e in expected)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    items, plain, policy = make_items(), make_model(), make_policy(make_model())
    arms: dict[str, Callable[[], list[Tensor]]] = {
        "padded": lambda: padded(plain, items),
        "packed": lambda: packed(policy, items),
        "batch": lambda: stream(policy, items, "batch"),
        "group": lambda: stream(policy, items, "group"),
        "trajectory": lambda: stream(policy, items, "trajectory"),
    }
    exact = reference(items)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    errors: dict[str, float] = {}
    for repetition in range(arguments.repetitions + 1):  # the first warms up
        for name, run in arms.items():
            started = time.process_time()
            gradient = run()
            if repetition:
                seconds[name].append(time.process_time() - started)
            errors[name] = relative_error(gradient, exact)
    base = statistics.median(seconds["packed"])
    print(f"{'arm':<12}{'CPU s':>8}{'min':>8}{'max':>8}{'of packed':>11}{'error':>10}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:<12}{median:>8.2f}{min(values):>8.2f}{max(values):>8.2f}{median / base:>11.2f}{errors[name]:>10.1e}"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"cpu_s": seconds, "errors": errors, "torch": torch.__version__}, file, indent=2)


if __name__ == "__main__":
    main()
