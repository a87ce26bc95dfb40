"""`bench engine`: sampled tokens per second of the embedded engine against `generate()` of transformers.

Both sample from the same weights in this process, on the same threads, at temperature 1: every sequence has a prompt of
its own, and takes a given number of tokens without stopping. Arms are interleaved; figures are medians over the
repetitions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from thundersyncrl.bench.options import parser_of, positive, print_figures

if TYPE_CHECKING:
    from thundersyncrl.learner.policy import Policy

ARMS = ("generate", "embedded")
_EXAMPLE = """
example:
  thundersyncrl bench engine --batch 8 32 --json > engine.json

`arms` of the JSON object are median tokens per second, named arm@batch; `ratios` are the embedded engine's over those
of generate(), by batch.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; return the exit code."""
    options = _parser().parse_args(argv)
    figures = measure(
        model=options.model,
        batches=options.batch,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repetitions=options.repetitions,
        threads=options.threads,
    )
    print_figures(_table(figures), figures, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "engine", "Measure how fast the embedded engine samples, against generate() of transformers.", _EXAMPLE
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="as `model.path` of a config (default: smollm2-135m-instruct)")
    add("--batch", nargs="+", type=positive, default=[1, 8, 32], help="sequences at once (default: 1 8 32)")
    add("--prompt-tokens", type=positive, default=128, help="of each sequence (default: 128)")
    add("--new-tokens", type=positive, default=64, help="of each sequence (default: 64)")
    add("--repetitions", type=positive, default=3, help="timed rounds over all arms (default: 3)")
    add("--threads", type=positive, default=None, help="compute threads (default: every core)")
    return parser


def measure(
    *, model: str, batches: Sequence[int], prompt_tokens: int, new_tokens: int, repetitions: int, threads: int | None
) -> dict[str, Any]:
    """Return `arms` (arm@batch -> median tokens per second), `ratios` (batch -> embedded over generate), `details`.

    Args:
        model: hub id, folder or bundled name.
        batches: numbers of sequences.
        prompt_tokens: of each sequence.
        new_tokens: of each sequence.
        repetitions: timed rounds; one more warms up.
        threads: of torch, while this runs; None for every core.
    """
    import torch
    import transformers

    from thundersyncrl.build import num_threads_of
    from thundersyncrl.config import Config, ModelConfig
    from thundersyncrl.learner.policy import load_policy

    before, threads = torch.get_num_threads(), threads or num_threads_of(Config())
    torch.set_num_threads(threads)
    settings = ModelConfig(path=model, train="full")
    policy, _ = load_policy(settings)
    run = {"generate": _generate(settings), "embedded": partial(sample, policy)}
    speeds: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):  # the first warms up
        for batch in batches:
            ids = _prompts(policy.vocab_size, batch, prompt_tokens, seed=repetition)
            for arm in ARMS:
                started = time.perf_counter()
                taken = run[arm](ids, new_tokens)
                seconds = time.perf_counter() - started
                if taken != batch * new_tokens:
                    raise AssertionError(f"expected {batch * new_tokens} sampled tokens of {arm}, got {taken}")
                if repetition:
                    speeds.setdefault(f"{arm}@{batch}", []).append(taken / seconds)
    torch.set_num_threads(before)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {str(b): medians[f"embedded@{b}"] / medians[f"generate@{b}"] for b in batches}
    details: dict[str, Any] = {
        "tokens_per_s": speeds,
        "model": model,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"arms": medians, "ratios": ratios, "details": details}


def _prompts(vocab_size: int, batch: int, num_tokens: int, *, seed: int) -> list[tuple[int, ...]]:
    """Return random prompts, so that nothing is shared between them."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocab_size) for _ in range(num_tokens)) for _ in range(batch)]


def _generate(settings: Any) -> Callable[[list[tuple[int, ...]], int], int]:
    """Return a function that samples with transformers, on a model with its own attention and cache."""
    import torch
    from transformers import AutoModelForCausalLM

    from thundersyncrl.learner.bundled import resolve_model_path

    folder = resolve_model_path(settings.path)
    model = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()

    def run(prompts: list[tuple[int, ...]], num_tokens: int) -> int:
        ids = torch.tensor(prompts)
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return int(out[:, ids.shape[1] :].numel())

    return run


def sample(policy: Policy, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> int:
    """Sample `num_tokens` behind each prompt with the embedded engine's batcher; return how many were sampled."""
    from thundersyncrl.rollout.batching import Batcher, Call
    from thundersyncrl.rollout.decoder import Decoder
    from thundersyncrl.rollout.engine import Sample, SampleRequest

    longest = max(len(ids) for ids in prompts) + num_tokens
    samples: list[Sample] = []
    batcher = Batcher(
        Decoder(policy), max_concurrent=len(prompts), cache_tokens=2 * len(prompts) * (longest + 64), decode=None
    )
    batcher.go_live(0)

    def fail(error: Exception) -> None:
        raise error

    for index, ids in enumerate(prompts):
        request = SampleRequest(
            id=str(index), session=str(index), prompt_ids=ids, max_new_tokens=num_tokens, temperature=1.0, seed=index
        )
        batcher.add(Call(request=request, answer=samples.append, fail=fail))
    while batcher.has_work:
        batcher.run_slice()
    return sum(len(s.token_ids) for s in samples)


def _table(figures: dict[str, Any]) -> str:
    lines = [f"{'batch':>6}{'generate':>12}{'embedded':>12}{'ratio':>8}   tokens/s"]
    for batch, ratio in figures["ratios"].items():
        arms = figures["arms"]
        lines.append(f"{batch:>6}{arms[f'generate@{batch}']:>12.1f}{arms[f'embedded@{batch}']:>12.1f}{ratio:>8.2f}")
    return "\n".join(lines)
