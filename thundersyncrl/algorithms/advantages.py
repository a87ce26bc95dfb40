"""The published estimators by name: which formula, which coefficient class, which normalizer.

A new one is a few lines; the class is checked on real rewards when a group closes:

    >>> from thundersyncrl.algorithms.advantages import per_group
    >>> from thundersyncrl.algorithms.estimator import CoefficientClass, Estimator
    >>> signed = Estimator(
    ...     name="signed",
    ...     coefficient=CoefficientClass.BY_VALUE,
    ...     advantages=per_group(lambda group: [1.0 if r > 0.5 else -1.0 for r in group.rewards_G]),
    ... )
    >>> signed.advantages([GroupRewards(rewards_G=(1.0, 0.0), lengths_G=(3, 2))], 0.0)
    [[1.0, -1.0]]

then `register(signed)`.

Normalizers: papers that write the gradient of a whole trajectory's log-prob (RLOO, REINFORCE, OPO, MaxRL,
PKPO) divide by the number of trajectories only. "constant" is that up to one fixed factor, the constant
length. DAPO and CISPO write their token mean per prompt; like their implementations we take it over the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thundersyncrl.algorithms.batch_relative import inverse_deviation, whitened
from thundersyncrl.algorithms.estimator import (
    AdvantageFn,
    CoefficientClass,
    Estimator,
    GroupRewards,
    RewardDomain,
    register,
)
from thundersyncrl.algorithms.group_relative import (
    TRL_EPSILON,
    centered,
    clipped,
    leave_one_out,
    leave_one_out_normalized,
    length_weighted,
    mean_normalized,
    normalized,
)
from thundersyncrl.algorithms.order_statistics import max_at_k, pass_at_k
from thundersyncrl.algorithms.own_reward import above, positive_only
from thundersyncrl.errors import ConfigError


def per_group(advantage: Callable[[GroupRewards], list[float]]) -> AdvantageFn:
    """Return the estimator function that applies `advantage` to each group on its own.

    Example:
        >>> group = GroupRewards(rewards_G=(1.0, 0.0), lengths_G=(1, 1))
        >>> per_group(lambda g: leave_one_out(g.rewards_G))([group], 0.0)
        [[1.0, -1.0]]
    """

    def advantages(groups: Sequence[GroupRewards], baseline: float) -> list[list[float]]:
        del baseline
        return [advantage(group) for group in groups]

    return advantages


def _minus_running_mean(groups: Sequence[GroupRewards], baseline: float) -> list[list[float]]:
    return [above(group.rewards_G, baseline=baseline) for group in groups]


def make_clipped_grpo(bound: float, *, name: str = "grpo_clipped") -> Estimator:
    """Return GRPO with advantages limited to [-bound, bound]; not registered.

    Raises:
        ConfigError: bound isn't above 0.

    Example:
        >>> make_clipped_grpo(1.5, name="grpo_clipped_1.5").coefficient.value
        'by_value'
    """
    if not bound > 0.0:
        raise ConfigError(f"expected an advantage bound above 0, got {bound} (estimator {name!r})")
    return Estimator(
        name=name,
        coefficient=CoefficientClass.BY_VALUE,
        advantages=per_group(lambda g: clipped(normalized(g.rewards_G), bound=bound)),
        normalizer="trajectory",
    )


def make_pass_at_k(k: int, *, name: str = "pass_at_k") -> Estimator:
    """Return pass@k training for binary rewards; not registered. Groups need at least k members.

    Raises:
        ConfigError: k below 1.

    Example:
        >>> make_pass_at_k(8, name="pass_at_8").min_group_size
        8
    """
    if k < 1:
        raise ConfigError(f"expected k of at least 1, got {k} (estimator {name!r})")
    return Estimator(
        name=name,
        coefficient=CoefficientClass.BY_VALUE,
        advantages=per_group(lambda g: pass_at_k(g.rewards_G, k=k)),
        min_group_size=max(k, 2),
        reward_domain=RewardDomain.BINARY,
    )


def make_max_at_k(k: int, *, name: str = "pass_at_k_continuous") -> Estimator:
    """Return PKPO's best-of-k advantages for any rewards; not registered. Groups need at least k members.

    Declared arbitrary: with continuous rewards each value occurs once, so the class by_value would keep as
    much.

    Raises:
        ConfigError: k below 2.

    Example:
        >>> make_max_at_k(3, name="max_at_3").min_group_size
        3
    """
    if k < 2:
        raise ConfigError(f"expected k of at least 2, got {k} (estimator {name!r}); k = 1 is `rloo`")
    return Estimator(
        name=name,
        coefficient=CoefficientClass.ARBITRARY,
        advantages=per_group(lambda g: max_at_k(g.rewards_G, k=k)),
        min_group_size=k,
        normalizer="constant",
    )


def make_constant_baseline(baseline: float, *, name: str = "constant_baseline") -> Estimator:
    """Return REINFORCE against a fixed baseline; not registered.

    Example:
        >>> make_constant_baseline(0.0, name="reinforce").coefficient.value
        'known'
    """
    return Estimator(
        name=name,
        coefficient=CoefficientClass.KNOWN,
        advantages=per_group(lambda g: above(g.rewards_G, baseline=baseline)),
        min_group_size=1,
        normalizer="constant",
    )


def make_grpo(*, epsilon: float = TRL_EPSILON, sample: bool = False, name: str = "grpo") -> Estimator:
    """Return GRPO with another epsilon or deviation; not registered.

    Raises:
        ConfigError: epsilon isn't above 0.

    Example:
        >>> make_grpo(epsilon=1e-6, sample=True, name="grpo_verl").coefficient.value
        'affine_group'
    """
    if not epsilon > 0.0:
        raise ConfigError(f"expected an epsilon above 0, got {epsilon} (estimator {name!r})")
    return Estimator(
        name=name,
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=per_group(lambda g: normalized(g.rewards_G, epsilon=epsilon, sample=sample)),
        normalizer="trajectory",
    )


_GRPO_ADVANTAGES = per_group(lambda g: normalized(g.rewards_G))

GRPO = register(make_grpo())
"""GRPO with population deviation. Source: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300."""

GRPO_SAMPLE_STD = register(make_grpo(sample=True, name="grpo_sample_std"))
"""GRPO as TRL and verl compute it, with sample deviation."""

DR_GRPO = register(
    Estimator(
        name="dr_grpo",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=per_group(lambda g: centered(g.rewards_G)),
        normalizer="constant",
    )
)
"""r - mean with a constant length. Source: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv
2503.20783."""

RLOO = register(
    Estimator(
        name="rloo",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=per_group(lambda g: leave_one_out(g.rewards_G)),
        normalizer="constant",
    )
)
"""Leave-one-out baseline. Source: Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740."""

DAPO = register(
    Estimator(
        name="dapo",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=_GRPO_ADVANTAGES,
        drops_uniform_groups=True,
        normalizer="token",
    )
)
"""GRPO's advantages, token mean, dynamic sampling. Its higher clip bound has no effect in one on-policy step;
the overlong penalty is a reward term (`shaping`). Source: Yu et al. 2025, DAPO, arXiv 2503.14476."""

REINFORCE_PP = register(
    Estimator(
        name="reinforce_pp",
        coefficient=CoefficientClass.AFFINE_BATCH,
        advantages=whitened,
        min_group_size=1,
        normalizer="token",
    )
)
"""Whitened over the step. Source: Hu et al. 2025, REINFORCE++, arXiv 2501.03262."""

REINFORCE_PP_BASELINE = register(
    Estimator(
        name="reinforce_pp_baseline",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=per_group(lambda g: centered(g.rewards_G)),
        batch_scale=inverse_deviation,
        normalizer="token",
    )
)
"""Group mean as baseline, the step's deviation as scale. Source: Hu et al. 2025, REINFORCE++, arXiv
2501.03262."""

GSPO = register(
    Estimator(
        name="gspo",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=_GRPO_ADVANTAGES,
        normalizer="trajectory",
    )
)
"""At ratio 1 the gradient of its sequence ratio is the mean of the token scores: GRPO's own.
Source: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071."""

CISPO = register(
    Estimator(
        name="cispo",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=_GRPO_ADVANTAGES,
        normalizer="token",
    )
)
"""At ratio 1 its clipped detached weight is 1; against another engine's log-probs it is the truncated
importance weight (`weights.truncated_importance`). Source: MiniMax 2025, MiniMax-M1, arXiv 2506.13585."""

OPO = register(
    Estimator(
        name="opo",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=per_group(lambda g: length_weighted(g.rewards_G, g.lengths_G)),
        normalizer="constant",
    )
)
"""Length-weighted baseline. Source: Hao et al. 2025, OPO, arXiv 2505.23585."""

MAXRL = register(
    Estimator(
        name="maxrl",
        coefficient=CoefficientClass.AFFINE_GROUP,
        advantages=per_group(lambda g: mean_normalized(g.rewards_G)),
        normalizer="constant",
        reward_domain=RewardDomain.NON_NEGATIVE,
    )
)
"""Divided by the mean reward. Source: Tajwar et al. 2026, Maximum Likelihood RL, arXiv 2602.02710."""

LEAVE_ONE_OUT_STD = register(
    Estimator(
        name="leave_one_out_std",
        coefficient=CoefficientClass.BY_VALUE,
        advantages=per_group(lambda g: leave_one_out_normalized(g.rewards_G)),
        normalizer="token",
    )
)
"""Baseline and deviation both over the siblings. Source: NeMo-RL's GRPO."""

GRPO_CLIPPED = register(make_clipped_grpo(2.0))
"""GRPO with advantages limited to two deviations."""

PASS_AT_K = register(make_pass_at_k(4))
"""pass@4. Source: Chen et al. 2025, Pass@k Training, arXiv 2508.10751."""

PASS_AT_K_CONTINUOUS = register(make_max_at_k(4))
"""Best of 4. Source: Walder and Karkhanis 2025, Pass@K Policy Optimization, arXiv 2505.15201."""

RAFT = register(
    Estimator(
        name="raft",
        coefficient=CoefficientClass.KNOWN,
        advantages=per_group(lambda g: positive_only(g.rewards_G)),
        min_group_size=1,
        normalizer="trajectory",
    )
)
"""Positive samples only, weighed by their reward. The papers divide by the number of positive samples, we by
that of all. Source: Dong et al. 2023, RAFT, arXiv 2304.06767; Xiong et al. 2025, arXiv 2504.11343."""

CONSTANT_BASELINE = register(make_constant_baseline(0.5))
"""REINFORCE against 0.5, the middle of rewards from 0 to 1. Source: Williams 1992."""

RUNNING_MEAN = register(
    Estimator(
        name="running_mean",
        coefficient=CoefficientClass.KNOWN,
        advantages=_minus_running_mean,
        min_group_size=1,
        needs_baseline=True,
        normalizer="constant",
    )
)
"""REINFORCE against the mean reward of past steps (`own_reward.RunningMean`). Source: Williams 1992."""
