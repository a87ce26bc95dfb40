"""Runs a certificate: references first, then every estimator, level, arrival order, dtype and kind of training."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thundersyncrl.certify.cases import RewardKind
from thundersyncrl.certify.compare import WHOLE, broken, parameter_kind, relative_errors
from thundersyncrl.certify.reference import Surrogate, batch_gradients, plain_copy, surrogate
from thundersyncrl.certify.report import Case, CertifyReport
from thundersyncrl.certify.sabotage import check_sabotage, sabotaged
from thundersyncrl.certify.streaming import streamed_gradient
from thundersyncrl.certify.subjects import (
    BASELINE,
    FAMILIES,
    Round,
    Subject,
    config_subjects,
    rewards_of,
    tiny_subjects,
)
from thundersyncrl.config import Config
from thundersyncrl.errors import ConfigError, ThunderSyncError
from thundersyncrl.learner.policy import DTYPES, Policy
from thundersyncrl.records import Trajectory

_Key = tuple[str, RewardKind]
"""(objective, rewards)"""
_QUIET_S = 10.0
"""Longest silence where cases take their time."""


def certify(
    config: Config | None,
    *,
    tiny: bool,
    num_orders: int = 20,
    sabotage: str = "",
    progress: Callable[[str], None],
) -> CertifyReport:
    """Return whether the streamed update is the update of plain batch training, measured.

    Args:
        config: certifies its estimator; without `tiny` also its model, on trajectories sampled from its tasks. None
            takes every registered estimator.
        tiny: random models of all supported families, full and LoRA.
        num_orders: arrival orders of each batch; with `tiny`.
        sabotage: name of a fault to plant; the certificate must then fail. It runs one family and 4 orders.
        progress: hears a line now and then.

    Raises:
        ConfigError: neither config nor `tiny`, no such sabotage, or a config whose rollouts run ahead.
    """
    started = time.perf_counter()
    if config is not None and config.rollout.max_staleness:
        raise ConfigError(
            f"expected `rollout.max_staleness` 0, got {config.rollout.max_staleness}: the update of an asynchronous "
            "run isn't a batch's update of one policy, so there is nothing to certify; set it to 0"
        )
    check_sabotage(sabotage)
    if tiny:
        families, num_orders = (tuple(FAMILIES)[:1], 4) if sabotage else (tuple(FAMILIES), num_orders)
        subjects = tiny_subjects(config, families=families, num_orders=num_orders)
    elif config is not None:
        subjects = config_subjects(config, progress)
    else:
        raise ConfigError("expected a config to certify, or tiny=True, got neither")
    certificate = _Certificate(sabotage, progress)
    with _threads(1 if tiny else torch.get_num_threads()):
        for subject in subjects:
            certificate.add(subject)
    return CertifyReport(
        cases=certificate.cases,
        num_packs=certificate.num_packs,
        seconds=time.perf_counter() - started,
        sabotage=sabotage,
    )


@contextmanager
def _threads(num: int) -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)  # tiny matrices gain nothing from a second core
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Certificate:
    """Cases as they are gathered."""

    def __init__(self, sabotage: str, progress: Callable[[str], None]):
        self._sabotage = sabotage
        self._progress = progress
        self._told = time.perf_counter()
        self.cases: list[Case] = []
        self.num_packs: Counter[str] = Counter()

    def add(self, subject: Subject) -> None:
        """Certify one model in one kind of training."""
        surrogates = {
            (name, kind): surrogate(objective, subject.batches[kind], baseline=BASELINE)
            for name, objective in subject.objectives.items()
            for kind in _reward_kinds(subject, name)
        }
        self._progress(f"{subject.name} {subject.train}: float64 batch reference")
        policy = subject.load("float64")
        references = _plain_gradients(subject, policy, "float64", surrogates, subject.trajectories)
        for dtype in dict.fromkeys(r.dtype for r in subject.rounds):
            controls: dict[_Key, dict[str, float]] = {}
            if dtype != "float64":
                policy = subject.load(dtype)
                controls = _control(subject, policy, dtype, surrogates, references)
            for round in subject.rounds:
                if round.dtype == dtype:
                    self._run(subject, round, policy, references, controls)

    def _run(
        self,
        subject: Subject,
        round: Round,
        policy: Policy,
        references: Mapping[_Key, list[Tensor]],
        controls: Mapping[_Key, Mapping[str, float]],
    ) -> None:
        before = len(self.cases)
        kinds = [parameter_kind(name) for name in policy.trained]
        for name in subject.objectives:
            for order in round.orders:
                kind = _kind_of(subject, round, name, order)
                if kind is None:
                    continue
                for stream in round.streams:
                    self._tell_if_slow(f"{subject.name} {subject.train} {round.dtype}: {name} {stream} order {order}")
                    errors, reason = self._errors(subject, policy, (name, kind), stream, order, references, kinds)
                    self.cases.append(
                        Case(
                            model=subject.name,
                            train=subject.train,
                            dtype=round.dtype,
                            estimator=name,
                            rewards=kind,
                            stream=stream,
                            order=order,
                            errors=errors,
                            control=controls.get((name, kind), {}),
                            reason=reason,
                        )
                    )
        done = self.cases[before:]
        if done:
            what = f"{subject.name} {subject.train} {round.dtype}{' rewards + 10,000' if round.offset else ''}"
            worst, failed = max(c.errors[WHOLE] for c in done), sum(not c.passes for c in done)
            self._progress(f"{what}: {len(done)} cases, worst {worst:.1e}, {failed} failed")

    def _tell_if_slow(self, line: str) -> None:
        if time.perf_counter() - self._told > _QUIET_S:
            self._told = time.perf_counter()
            self._progress(line)

    def _errors(
        self,
        subject: Subject,
        policy: Policy,
        key: _Key,
        stream: str,
        order: int,
        references: Mapping[_Key, list[Tensor]],
        kinds: Sequence[str],
    ) -> tuple[Mapping[str, float], str]:
        name, rewards = key
        try:
            with sabotaged(self._sabotage):
                streamed = streamed_gradient(
                    policy,
                    subject.objectives[name],
                    subject.batches[rewards],
                    stream=stream,
                    order=order,
                    baseline=BASELINE,
                )
        except ThunderSyncError as error:  # a refusal in the middle of a step is a finding, not a crash
            return broken(kinds), f"{type(error).__name__}: {error}"
        self.num_packs.update(streamed.num_packs)
        return relative_errors(streamed.gradient, references[key], kinds), ""


def _reward_kinds(subject: Subject, name: str) -> set[RewardKind]:
    found = {_kind_of(subject, r, name, order) for r in subject.rounds for order in r.orders}
    return {kind for kind in found if kind is not None}


def _kind_of(subject: Subject, round: Round, name: str, order: int) -> RewardKind | None:
    """Return the rewards of an order; None for offset rewards where the estimator takes binary ones only."""
    kind = rewards_of(subject.objectives[name], order)
    if not round.offset:
        return kind
    takes_any = rewards_of(subject.objectives[name], 0) is RewardKind.GRADED
    return RewardKind.OFFSET if takes_any else None


def _plain_gradients(
    subject: Subject,
    policy: Policy,
    dtype: str,
    surrogates: Mapping[_Key, Surrogate],
    trajectories: tuple[Trajectory, ...],
) -> dict[_Key, list[Tensor]]:
    plain = plain_copy(policy, dtype=DTYPES[dtype])
    return batch_gradients(plain, trajectories, surrogates, temperature=subject.temperature)


def _control(
    subject: Subject,
    policy: Policy,
    dtype: str,
    surrogates: Mapping[_Key, Surrogate],
    references: Mapping[_Key, list[Tensor]],
) -> dict[_Key, dict[str, float]]:
    """Return the errors of a plain batch gradient in this dtype, with the batch permuted."""
    permuted = tuple(random.Random(1).sample(subject.trajectories, len(subject.trajectories)))
    gradients = _plain_gradients(subject, policy, dtype, surrogates, permuted)
    kinds = [parameter_kind(name) for name in policy.trained]
    return {key: relative_errors(gradient, references[key], kinds) for key, gradient in gradients.items()}
