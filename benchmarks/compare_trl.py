"""hexctl beside TRL's asynchronous GRPO: the same two GPUs, model, data, lengths, batch, learning rate and staleness bound.

    python -m benchmarks.compare_trl configs/smollm2-gsm8k-gpus-2.toml --seconds 180 --json compare.json

One side after the other, each for `--seconds` from its first optimiser step on. hexctl is its daemon; TRL is `AsyncGRPOTrainer`
on the first GPU and `vllm serve` on the second, as its own guide has it. Counted are samples and response tokens that an optimiser
step trained on, over the wall time from the end of step `SETTLE` to the end of the last; the reward is that of the samples trained.
As a model learns its answers change their length, at each side at another time: for tokens/s beside each other hold the model
still (`--set algorithm.learning_rate=1e-12`). Needs a configuration with a JSON-lines task, two GPUs, vllm and trl (docs/gpu.md).
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from runtime.config.load import load_config
from runtime.config.schema import Config
from runtime.rl.model.attention import varlen_kernel
from runtime.rl.rewards.verifiers import VerifierSpec, make_verifier
from runtime.rl.tasks.rows import read_rows
from tests.live import LiveRun, steps

SETTLE = 5  # steps left out at the start: compilation, empty queues
LAST = 20  # steps whose reward is reported
START_S = 420.0  # for a side to make its first step
ROWS = "steps.jsonl"
CHATML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
COUNTED = ("samples", "trained_tokens", "reward_mean")


def summary(rows: Sequence[dict[str, float]], most: int | None = None) -> dict[str, float]:
    """Figures of one side from its steps: `at_s`, `samples`, `trained_tokens`, `reward_mean`. Rates are over at most `most` steps;
    fewer than SETTLE + 2 steps have none."""
    found: dict[str, float] = {"steps": len(rows)}
    if len(rows) < SETTLE + 2:
        return found
    counted = rows[SETTLE + 1 :][:most]
    seconds = counted[-1]["at_s"] - rows[SETTLE]["at_s"]
    found["trained_tokens_per_s"] = sum(r["trained_tokens"] for r in counted) / seconds
    found["samples_per_s"] = sum(r["samples"] for r in counted) / seconds
    found["tokens_a_sample"] = sum(r["trained_tokens"] for r in counted) / sum(r["samples"] for r in counted)
    found["step_s_median"] = statistics.median(
        b["at_s"] - a["at_s"] for a, b in zip(rows[SETTLE:], counted, strict=False)
    )
    found["reward_first"] = statistics.fmean(r["reward_mean"] for r in rows[:LAST])
    found["reward_last"] = statistics.fmean(r["reward_mean"] for r in rows[-LAST:])
    found["reward_per_hour"] = (
        (found["reward_last"] - found["reward_first"]) / (rows[-1]["at_s"] - rows[0]["at_s"]) * 3600
    )
    return found


def hexctl_rows(config: Path, seconds: float, root: Path, changed: Sequence[str]) -> list[dict[str, float]]:
    """Steps of `hexctl daemon`, from the run's metrics.jsonl. A run's time counts from when trainer and replica are at work.
    Whatever happens nothing of the run is left, and the steps it made are told."""
    run = LiveRun(root)
    try:
        run.start(config.resolve(), "--for", f"{seconds:g}s", *_set(changed))
        run.until(lambda s: steps(s) > 0, "a first step", deadline_s=START_S)
        run.end(seconds + START_S)
    except (AssertionError, subprocess.TimeoutExpired) as e:
        print(f"hexctl: {e}", file=sys.stderr)
    finally:
        run.close()
        sys.stderr.write(run.log.read_text()[-6000:])
    return rows_of(run.metrics())


def rows_of(metrics: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Steps of a metrics.jsonl."""
    return [{"at_s": r["time_unix_s"], **{k: r[k] for k in COUNTED}} for r in metrics]


def trl_rows(config: Path, seconds: float, root: Path, changed: Sequence[str]) -> list[dict[str, float]]:
    """Steps of TRL's trainer, by a process of its own on the first GPU."""
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    out = root / ROWS
    with _served(_loaded(config, changed), gpus[1]) as url:
        command = [sys.executable, "-m", "benchmarks.compare_trl", str(config), "--seconds", str(seconds), "--trl-steps", str(out),
                   "--url", url, *_set(changed)]  # fmt: skip
        subprocess.run(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus[0], "VLLM_HOST_IP": "127.0.0.1"},
            check=True,
            timeout=seconds + START_S,
        )
    return [json.loads(line) for line in out.read_text().splitlines()]


def _set(changed: Sequence[str]) -> list[str]:
    return [part for value in changed for part in ("--set", value)]


def _loaded(config: Path, changed: Sequence[str]) -> Config:
    return load_config(config, overrides=dict(c.split("=", 1) for c in changed)).config


@contextmanager
def _served(config: Config, gpu: str) -> Iterator[str]:
    """`vllm serve` of the model in a process group of its own, ended with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    longest = int(config.lengths.prompt_max) + config.sampling.max_new_tokens + 8
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(config.model.path), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", config.model.rollout_dtype or config.model.dtype, "--max-model-len", str(longest),
        "--gpu-memory-utilization", "0.85", "--max-num-seqs", str(config.sampling.max_running),
        "--weight-transfer-config", '{"backend": "nccl"}',
    ]  # fmt: skip
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    server = subprocess.Popen(command, env=env, start_new_session=True, stdout=sys.stderr)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class FormatReward:
    """The configuration's verifier as TRL calls one: texts and ids in, a reward each. Its process imports it by name."""

    def __init__(self, name: str, eos_ids: frozenset[int]) -> None:
        self.name, self.eos_ids = name, eos_ids
        self.__name__ = name

    def __call__(self, completions: Any, completion_ids: Any, answer: Any, **rest: Any) -> list[float]:
        del rest
        verify = make_verifier(VerifierSpec(name=self.name))
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        ended = ["eos" if ids and ids[-1] in self.eos_ids else "length" for ids in completion_ids]
        return [verify("", t, a, e) for t, a, e in zip(texts, answer, ended, strict=True)]  # type: ignore[arg-type]


def stand_in_attention() -> str:
    """TRL takes its attention from a hub of kernels (FlashAttention 3). Where that is out of reach torch's kernel for variable
    lengths stands in, which is one generation older; at a few hundred tokens a sample attention is a small part of a step.
    Returns what is used."""
    from trl.experimental.async_grpo import packing

    try:
        packing._flash_attn()
    except Exception as e:  # noqa: BLE001 - no package, no network, no kernel for this torch
        kernel = varlen_kernel()

        def varlen(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, most_q: Any, most_k: Any, **how: Any) -> Any:  # noqa: PLR0917
            assert how.get("causal"), how
            assert tuple(how.get("window_size", (-1, -1))) == (-1, -1), how
            scale = how.get("softmax_scale")
            return kernel(q, k, v, of_q, of_k, int(most_q), int(most_k), **({} if scale is None else {"scale": scale}))

        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
        return f"torch's varlen_attn; the hub's FlashAttention 3 is not to be had: {type(e).__name__}"
    return "FlashAttention 3 from the hub"


def train_with_trl(config: Config, seconds: float, url: str, out: Path) -> None:
    """Run AsyncGRPOTrainer until `seconds` after its first step, a line of figures a step into `out`. A step is as many samples
    as hexctl's: TRL's token budget would make it as many as fit."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    print(f"TRL's attention: {stand_in_attention()}", file=sys.stderr, flush=True)
    a, task = config.algorithm, config.task
    tokenizer = AutoTokenizer.from_pretrained(str(config.model.path))
    if "<|im_start|>" in (tokenizer.chat_template or ""):
        # TRL reads answers back into turns and knows few templates; of ChatML it needs where an answer begins and ends.
        tokenizer.response_template = CHATML
    generation = json.loads((Path(config.model.path) / "generation_config.json").read_text()).get("eos_token_id")
    eos = {tokenizer.eos_token_id, *(generation if isinstance(generation, list) else [generation])}

    def turns(text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
        return [*system, {"role": "user", "content": task.prompt_template.replace("{prompt}", text)}]

    assert task.path is not None
    rows = read_rows(task.path, task)
    dataset = Dataset.from_list([{"prompt": turns(r.prompt), "answer": r.answer} for r in rows])

    class Steps(TrainerCallback):  # type: ignore[misc]
        began: float | None = None

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **rest: Any) -> None:
            del args, state, rest
            tokens, reward = logs.get("batch/trained_tokens_per_step"), logs.get("reward")
            samples = logs.get("batch/samples_per_step")
            if tokens is None or reward is None or samples is None:
                return
            now = time.time()
            self.began = self.began or now
            with out.open("a") as f:
                row = {"at_s": now, "samples": samples, "trained_tokens": tokens, "reward_mean": reward, "logs": logs}
                f.write(json.dumps(row) + "\n")
            control.should_training_stop = now - self.began > seconds

    with TemporaryDirectory() as scratch:
        AsyncGRPOTrainer(
            model=str(config.model.path),
            reward_funcs=FormatReward(task.reward, frozenset(e for e in eos if e is not None)),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[Steps()],
            args=AsyncGRPOConfig(
                output_dir=scratch, save_strategy="no", report_to=[], max_steps=100_000, seed=config.run.seed,
                num_generations=a.responses_per_prompt, per_device_train_batch_size=a.prompts_per_step * a.responses_per_prompt,
                gradient_accumulation_steps=1, token_budget=0, max_completion_length=config.sampling.max_new_tokens,
                temperature=config.sampling.temperature, learning_rate=a.learning_rate, warmup_steps=a.warmup_steps,
                adam_beta1=a.betas[0], adam_beta2=a.betas[1], weight_decay=a.weight_decay, max_grad_norm=a.grad_norm_max,
                epsilon=a.clip_low, epsilon_high=a.clip_high, max_staleness=a.eta, vllm_server_base_url=url,
                gradient_checkpointing=False,
            ),
        ).train()  # fmt: skip


SIDES = {"hexctl": hexctl_rows, "trl": trl_rows}


def main() -> int:
    """Run the sides, print their figures side by side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_trl", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="of each side, from its first step on")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="changes the configuration, for both"
    )
    parser.add_argument(
        "--rate-steps", type=int, help="rates over so many steps: while both sides' answers are as long still"
    )
    parser.add_argument(
        "--metrics", type=Path, help="hexctl's side: a metrics.jsonl of this configuration on this machine"
    )
    parser.add_argument("--json", type=Path, help="also write figures and steps here")
    parser.add_argument("--trl-steps", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl_steps is not None:
        train_with_trl(_loaded(given.config, given.set), given.seconds, given.url, given.trl_steps)
        return 0
    rows: dict[str, list[dict[str, float]]] = {}
    if given.metrics is not None:
        rows["hexctl"] = rows_of([json.loads(line) for line in given.metrics.read_text().splitlines()])
    for side in given.sides:
        if side in rows:
            continue
        with TemporaryDirectory() as root:
            rows[side] = SIDES[side](given.config, given.seconds, Path(root), given.set)
    figures = {side: summary(steps, given.rate_steps) for side, steps in rows.items()}
    for name in sorted({k for f in figures.values() for k in f}):
        print(f"{name:24}", *(f"{side} {f.get(name, float('nan')):>12,.4f}" for side, f in figures.items()))
    if given.json is not None:
        given.json.write_text(json.dumps({"figures": figures, "steps": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
