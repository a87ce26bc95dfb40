"""TRL's GRPOTrainer in a process of its own, for `bench trl`.

| who           | waits for              | released by               |
| ------------- | ---------------------- | ------------------------- |
| TRL's process | "go", before each step | `TrlArm.step`, by a pipe  |
| `TrlArm`      | what the step took     | the process, or its end   |
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from thundersyncrl.bench.tool_world import Script, ToolWorld, Workload
from thundersyncrl.bench.trl_workload import Setup, Step, measured, script_of
from thundersyncrl.errors import ContractError, WorkerError
from thundersyncrl.records import Task

TOOL = "look"
"""Name of the tool."""
# As the template of the random model, where a tool's text is a user message; TRL wants to see calls rendered, too.
TRL_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TrlEnvironment:
    """What TRL makes for each trajectory of a batch; its public method is the tool.

    Args:
        work: what is drawn.
        position: of the trajectory in the batch; members of a group stand next to each other.
    """

    def __init__(self, work: Workload, position: int):
        self._work = work
        self._member = position % work.group_size
        self._script: Script | None = None
        self._turn = 0

    def reset(self, task_id: str, **_: Any) -> None:
        """Begin a trajectory."""
        self._script, self._turn = script_of(self._work, task_id, self._member), 0

    def look(self) -> str:
        """Wait as long as the script says.

        Returns:
            What the script prints.
        """
        if self._script is None:
            raise ContractError("expected `reset` before the first call of a tool, got none; does TRL still reset?")
        turn, self._turn = self._turn, self._turn + 1
        time.sleep(self._script.tools_s[turn])
        return self._script.observations[turn]


def force_tool_calls(tokenizer: Any) -> None:
    """Have TRL read a call of the tool in whatever was sampled; `max_tool_calling_iterations` ends the turns."""
    tokenizer.chat_template = TRL_TEMPLATE
    tokenizer.response_template = {}  # only that it isn't None matters: TRL then asks `parse_response`

    def parse_response(response: Any, **_: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": TOOL, "arguments": {}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    tokenizer.parse_response = parse_response


def trl_settings(setup: Setup) -> dict[str, Any]:
    """Return the arguments of GRPOConfig: what our arm does, and else TRL's defaults."""
    learner, work = setup.config().learner, setup.work
    num_micro_batches = setup.num_trajectories // setup.micro_batch
    return {
        "output_dir": str(setup.folder / "trl"),
        "max_steps": 1 + setup.num_steps,
        "seed": work.seed,
        "use_cpu": True,
        "bf16": False,  # TRL's default is True
        "gradient_checkpointing": False,  # TRL's default is True, which recomputes forwards
        "beta": 0.0,
        "use_vllm": False,
        "loss_type": "grpo",
        "num_iterations": 1,
        "num_generations": work.group_size,
        "per_device_train_batch_size": setup.micro_batch,
        "gradient_accumulation_steps": num_micro_batches,
        "steps_per_generation": num_micro_batches,
        "shuffle_dataset": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        # of a whole trajectory with the tools' texts, never reached; a turn's own limit has to be given to generate()
        "max_completion_length": work.context_tokens,
        "generation_kwargs": {"max_new_tokens": work.turn_tokens},
        "max_tool_calling_iterations": setup.num_turns - 1,
        "learning_rate": learner.learning_rate,
        "lr_scheduler_type": learner.schedule,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


class _Gate(TrainerCallback):
    """Holds each step until the benchmark says go, and tells it what the step took."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._started = self._seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._connection.recv()
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds = time.perf_counter() - self._started

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "completions/mean_length" in logs:  # the last log of all is of the whole run
            self._connection.send({**logs, "seconds": self._seconds})


def _serve_trl(connection: Connection, setup: Setup) -> None:
    """Train with TRL, a step at each "go"; runs in a process of its own."""
    os.dup2(2, 1)  # what libraries print is no part of the benchmark's output
    warnings.simplefilter("ignore", FutureWarning)  # TRL's own use of old names of transformers
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `environment_factory` is called experimental
    try:
        torch.set_num_threads(setup.num_threads)
        trainer = _trl_trainer(setup)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Gate(connection))
        connection.send({})
        trainer.train()
    except Exception:
        connection.send({"failed": traceback.format_exc()})


def _trl_trainer(setup: Setup) -> Any:
    # by name, so that neither is needed where nobody runs this
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    work, model = setup.work, str(setup.folder / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    positions = itertools.count()
    uses_tool = setup.num_turns > 1
    if uses_tool:
        force_tool_calls(tokenizer)

    def reward(task_id: Sequence[str], **_: Any) -> list[float]:
        return [script_of(work, id, i % work.group_size).reward for i, id in enumerate(task_id)]

    rows = [
        {"prompt": messages(task), "task_id": task.id}
        for number in range(1 + setup.num_steps)
        for task in setup.tasks(number)
    ]
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=[reward],
        args=trl.GRPOConfig(**trl_settings(setup)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=(lambda: TrlEnvironment(work, next(positions))) if uses_tool else None,
    )


def messages(task: Task) -> list[dict[str, str]]:
    """Return the prompt as our arm renders it."""
    return [
        {"role": "system", "content": ToolWorld.system_prompt},
        {"role": "user", "content": task.instruction},
    ]


class TrlArm:
    """TRL's trainer in a process of its own; idle between its steps."""

    def __init__(self, setup: Setup):
        context = multiprocessing.get_context("spawn")
        self._setup = setup
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_trl, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()

    async def start(self) -> None:
        """Return once the trainer is there; raises as `step`."""
        await self._answer()

    async def step(self, number: int) -> Step:
        """Take the next step.

        Raises:
            WorkerError: the process ended.
            ContractError: trajectories didn't take their turns, or some weren't trained.
        """
        self._connection.send(number)
        logs = await self._answer()
        if logs.get("tools/failure_frequency", 0.0):
            raise ContractError(f"expected no failed tool calls of TRL, got {logs['tools/failure_frequency']:.1%}")
        if logs["frac_reward_zero_std"]:
            raise ContractError(
                f"expected rewards that differ in every group of TRL, got {logs['frac_reward_zero_std']:.1%} of groups "
                "without; their trajectories aren't trained"
            )
        return measured(
            self._setup,
            "trl",
            number,
            seconds=logs["seconds"],
            num_trained=self._setup.num_trajectories,
            num_tokens=round(logs["completions/mean_length"] * self._setup.num_trajectories),
            turns=1.0 + logs.get("tools/call_frequency", 0.0),
        )

    async def _answer(self) -> dict[str, Any]:
        try:
            answer = await asyncio.to_thread(self._connection.recv)
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"expected an answer of TRL's process, it ended with exit code {self._process.exitcode}; is the "
                "machine out of memory?"
            ) from error
        if "failed" in answer:
            raise WorkerError(f"expected a step of TRL's trainer, it failed:\n{answer['failed']}")
        return answer

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.terminate()
        self._process.join()
