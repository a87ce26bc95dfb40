"""Text for people: a step, an evaluation or a trajectory as lines that any terminal can show."""

from __future__ import annotations

from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.records import StepReport, Trajectory

_CUT_MARK = " ... "


def step_line(report: StepReport) -> str:
    """Return one line about a step; a metric that it lacks is left out.

    Example:
        >>> report = StepReport(step=3, version=3, num_launched=8, num_trained=7, num_dropped=0, num_failed=1,
        ...     failures={"tool": 1}, metrics={"reward_mean": 0.25, "pass_rate": 0.25, "time_rollout_s": 2.0})
        >>> step_line(report)
        'step 3  reward 0.250  pass 25.0 %  rollout 2.0 s  1 of 8 failed (tool 1)'
    """
    metrics = report.metrics
    parts = [f"step {report.step}"]
    if "reward_mean" in metrics:
        parts.append(f"reward {metrics['reward_mean']:.3f}")
    if "pass_rate" in metrics:
        parts.append(f"pass {percent(metrics['pass_rate'])}")
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    parts += [f"{name} {seconds:.1f} s" for name, seconds in phase_seconds(report).items()]
    parts += overlap_parts(report)
    if "staleness_mean" in metrics:
        parts.append(f"asynchronous, {metrics['staleness_mean']:.1f} versions old")
    if report.level:
        parts.append(f"by {report.level.partition(':')[0]}")
    if report.num_dropped:
        parts.append(f"{report.num_dropped} of {report.num_launched} dropped")
    if report.num_failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(report.failures.items()))
        parts.append(f"{report.num_failed} of {report.num_launched} failed ({kinds})")
    return "  ".join(parts)


def phase_seconds(report: StepReport) -> dict[str, float]:
    """Return the seconds of each phase of the step, by the phase's name.

    Example:
        >>> report = StepReport(step=0, version=0, num_launched=0, num_trained=0, num_dropped=0, num_failed=0,
        ...     failures={}, metrics={"time_learn_s": 1.5, "step_s": 2.0})
        >>> phase_seconds(report)
        {'learn': 1.5}
    """
    return {
        name.removeprefix("time_").removesuffix("_s"): value
        for name, value in report.metrics.items()
        if name.startswith("time_") and name.endswith("_s")
    }


def overlap_parts(report: StepReport) -> list[str]:
    """Return what a step says about hardware that idled; empty where nothing was measured.

    Example:
        >>> metrics = {"overlap": 0.75, "idle_engine_s": 1.0, "idle_learner_s": 2.5, "above_bound": 0.08}
        >>> report = StepReport(step=0, version=0, num_launched=0, num_trained=0, num_dropped=0, num_failed=0,
        ...     failures={}, metrics=metrics)
        >>> overlap_parts(report)
        ['overlap 75 %', 'idle engine 1.0 s', 'idle learner 2.5 s', '8 % above the bound']
    """
    metrics, parts = report.metrics, list[str]()
    if "overlap" in metrics:
        parts.append(f"overlap {100 * metrics['overlap']:.0f} %")
    for actor in ("engine", "learner"):
        if f"idle_{actor}_s" in metrics:
            parts.append(f"idle {actor} {metrics[f'idle_{actor}_s']:.1f} s")
    if "above_bound" in metrics:
        parts.append(f"{100 * metrics['above_bound']:.0f} % above the bound")
    return parts


def evaluation_line(name: str, result: EvaluationResult) -> str:
    """Return one line about held-out tasks.

    Example:
        >>> evaluation_line("warm", EvaluationResult(num=60, pass_rate=0.5, several_turns_pass_rate=0.25))
        'held-out, warm: pass 50.0 % of 60, several turns 25.0 %'
    """
    parts = [f"held-out, {name}: pass {percent(result.pass_rate)} of {result.num}"]
    if result.several_turns_pass_rate is not None:
        parts.append(f"several turns {percent(result.several_turns_pass_rate)}")
    if result.num_failed:
        parts.append(f"{result.num_failed} without a verdict")
    return ", ".join(parts)


def transcript_lines(trajectory: Trajectory, reward: float | None, *, message_chars: int = 600) -> list[str]:
    """Return a trajectory as a chat to read, long messages cut in the middle."""
    outcome = trajectory.outcome
    verdict = "no reward" if reward is None else f"reward {reward:g}"
    end = f"{outcome.status}{f' ({outcome.cause})' if outcome.cause else ''}"
    lines = [f"{trajectory.id}  task {trajectory.task.id}  {verdict}  {end}"]
    for message in trajectory.messages:
        text = printable(cut_middle(message["content"], message_chars))
        lines += [f"  {message['role']}:", *(f"    {line}" for line in text.split("\n"))]
    return lines


def percent(rate: float) -> str:
    """Return a rate as percent.

    Example:
        >>> percent(0.125)
        '12.5 %'
    """
    return f"{100 * rate:.1f} %"


def cut_middle(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, its beginning and its end.

    Example:
        >>> cut_middle("abcdefghijklmnop", 11)
        'abc ... nop'
    """
    if len(text) <= limit:
        return text
    head = (limit - len(_CUT_MARK)) // 2
    return text[:head] + _CUT_MARK + text[len(text) - (limit - len(_CUT_MARK) - head) :]


def printable(text: str) -> str:
    """Return text whose control characters are spelled out: a model's output must not steer the terminal.

    Example:
        >>> printable("a" + chr(27) + "[2Jb")
        'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
