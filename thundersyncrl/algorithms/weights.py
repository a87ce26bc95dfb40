"""Token weights and divisors that don't depend on rewards.

The step's gradient is (1 / divisor) * sum_i A_i * sum_t w_it * grad log pi_it: sums are accumulated over any
split of the step, and the division happens once, with the counts of the whole step. (A mean of means weighs
tokens by the split.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thundersyncrl.errors import ConfigError, ContractError, NumericsError

NORMALIZERS = ("token", "trajectory", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """How token scores are averaged over a step.

    | name         | w_it             | divisor                                     |
    | ------------ | ---------------- | ------------------------------------------- |
    | `token`      | 1                | action tokens of all counted trajectories   |
    | `trajectory` | 1 / own length   | counted trajectories                        |
    | `constant`   | 1                | counted trajectories * constant_length      |

    A trajectory without action tokens adds nothing to the sum, but it is counted like any other. Trajectories
    are counted, not groups: papers average over prompts, the same as long as all groups have one size.

    Raises:
        ConfigError: unknown name; a constant length where it has no effect, or none where it is needed.

    Source:
        token: Yu et al. 2025, DAPO, arXiv 2503.14476. trajectory: Shao et al. 2024, arXiv 2402.03300.
        constant: Liu et al. 2025, Dr. GRPO, arXiv 2503.20783.

    Example:
        >>> Normalizer(name="token").divisor([1, 9]), Normalizer(name="trajectory").divisor([1, 9])
        (10.0, 2.0)
        >>> Normalizer(name="constant", constant_length=256).divisor([1, 9])
        512.0
    """

    name: str
    constant_length: int | None = None
    """Tokens; only for `constant`."""

    def __post_init__(self) -> None:
        if self.name not in NORMALIZERS:
            raise ConfigError(f"expected a normalizer of {', '.join(NORMALIZERS)}, got {self.name!r}")
        if self.name == "constant" and (self.constant_length is None or self.constant_length < 1):
            raise ConfigError(
                f"expected a constant length of at least 1 token for the normalizer `constant`, got "
                f"{self.constant_length}; set `algorithm.constant_length`"
            )
        if self.name != "constant" and self.constant_length is not None:
            raise ConfigError(
                f"expected no constant length with the normalizer `{self.name}`, got {self.constant_length}, "
                "which would have no effect; remove `algorithm.constant_length` or choose `constant`"
            )

    def token_weight(self, length: int) -> float:
        """Return the weight w_it of each token of a trajectory with `length` action tokens; 0.0 without
        tokens.

        Example:
            >>> Normalizer(name="trajectory").token_weight(4)
            0.25
        """
        if length == 0:
            return 0.0
        return 1.0 / length if self.name == "trajectory" else 1.0

    def divisor(self, lengths_of_counted: Sequence[int]) -> float:
        """Return what the step's sum is divided by, once.

        Args:
            lengths_of_counted: action tokens of each trajectory that counts, zero-advantage ones included;
                those that failed, and the uniform groups of dynamic sampling, don't count.

        Returns:
            A number above 0; 1.0 when nothing is counted or, for `token`, no token is: the sum is then empty.
        """
        if self.name == "token":
            return float(sum(lengths_of_counted) or 1)
        if self.name == "trajectory":
            return float(len(lengths_of_counted) or 1)
        return float(len(lengths_of_counted) * (self.constant_length or 1) or 1)


def choose_normalizer(own: str, *, name: str | None, constant_length: int | None, longest: int) -> Normalizer:
    """Return the normalizer of a run.

    Args:
        own: The estimator's published normalizer, used when the config names none.
        name: `algorithm.normalizer`.
        constant_length: `algorithm.constant_length`; None takes `longest` where one is needed.
        longest: `rollout.max_action_tokens`, the generation budget, which is Dr. GRPO's own constant.

    Raises:
        ConfigError: a constant length that would have no effect, or an unknown name.

    Example:
        >>> choose_normalizer("constant", name=None, constant_length=None, longest=256)
        Normalizer(name='constant', constant_length=256)
    """
    chosen = own if name is None else name
    if chosen == "constant" and constant_length is None:
        constant_length = longest
    return Normalizer(name=chosen, constant_length=constant_length)


def truncated_importance(
    learner_logprobs: Sequence[float], behavior_logprobs: Sequence[float], cap: float
) -> list[float]:
    """Return the truncated importance weight of each token: w_t = min(exp(learner - behavior log-prob), cap).

    Detached constants: they correct for tokens sampled with slightly other arithmetic than the learner's, and
    keep the loss linear in the advantage.

    Args:
        learner_logprobs: [T] nats, the learner's own of the same policy version.
        behavior_logprobs: [T] nats, as the engine sampled.
        cap: Largest weight, above 0 and finite.

    Returns:
        [T] weights in (0, cap]; 0.0 where the learner gives the token no probability at all.

    Raises:
        ContractError: the two differ in number, or the cap isn't above 0 and finite.
        NumericsError: a difference that isn't a number.

    Source:
        Ionides 2008, Truncated Importance Sampling, JCGS 17(2); for sampler and learner of an RL step, Yao et
        al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training.

    Example:
        >>> truncated_importance([-1.0, -1.0], [-1.0, -3.0], cap=2.0)
        [1.0, 2.0]
    """
    if len(learner_logprobs) != len(behavior_logprobs):
        raise ContractError(
            f"expected one behavior log-prob per learner log-prob, got {len(behavior_logprobs)} for "
            f"{len(learner_logprobs)} tokens; both cover the action tokens only"
        )
    if not 0.0 < cap < math.inf:
        raise ContractError(f"expected a finite cap above 0, got {cap}; set `algorithm.importance_cap`")
    log_cap = math.log(cap)
    weights: list[float] = []
    for position, (learner, behavior) in enumerate(zip(learner_logprobs, behavior_logprobs, strict=True)):
        difference = learner - behavior
        if math.isnan(difference):
            raise NumericsError(
                f"expected log-probs that can be compared, got learner {learner} and behavior {behavior} "
                f"(action token {position}); look at the engine's and the learner's logits"
            )
        weights.append(cap if difference >= log_cap else math.exp(difference))
    return weights
