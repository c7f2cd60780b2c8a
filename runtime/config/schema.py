"""The run's configuration: TOML decoded with pydantic. Unknown keys are errors. Units may be written as text.

Pure: importing this module needs neither torch nor ray. Paths are relative to the file that names them
(`runtime.config.load` resolves them).
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from planner.units import parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds

Bytes = Annotated[float, BeforeValidator(parse_bytes), Field(gt=0)]
BytesPerS = Annotated[float, BeforeValidator(parse_bytes_per_s), Field(gt=0)]
Flops = Annotated[float, BeforeValidator(parse_flops), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]
Price = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A table of the file. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="prefix of the run's id")
    seed: int = Field(0, ge=0, description="seed of weights, prompts and sampling noise")
    root: Path = Field(Path("runs"), description="folder that holds run folders, relative to where hexctl is started")
    steps: int | None = Field(None, ge=1, description="stop after that many optimiser steps; default: never")
    disk_floor: Bytes = Field(1e9, validate_default=True, description="refuse to start with less free disk")


class ModelSection(Section):
    source: Literal["seeded", "pretrained", "shape"] = Field(
        description="seeded: random weights from the seed; pretrained: safetensors in `path`; shape: for planning only"
    )
    path: Path = Field(description="folder with config.json (and weights), or a config.json")
    dtype: Literal["float64", "float32", "bfloat16"] = Field("float32", description="parameters while training")
    rollout_dtype: Literal["float64", "float32", "bfloat16"] | None = Field(
        None, description="weights and KV cache while generating; default: as dtype"
    )
    tokenizer: str = Field("builtin:chars", description='"builtin:chars" or a Hugging Face folder (relative path)')
    scale_logits: bool = Field(False, description="seeded models: divide logits by sqrt(hidden)")


class TaskSection(Section):
    source: Literal["copy", "jsonl"] = Field(
        description="copy: digits to repeat, made from the seed; jsonl: rows of `path`"
    )
    min_length: int = Field(3, ge=1, description="copy: fewest digits")
    max_length: int = Field(11, ge=1, description="copy: most digits")
    path: Path | None = Field(None, description="jsonl: training rows")
    eval_path: Path | None = Field(None, description="jsonl: held-out rows")
    prompt_key: str = "question"
    answer_key: str = "answer"
    answer_after: str | None = Field(None, description='take the text after this marker as the answer, such as "####"')
    system_prompt: str | None = None
    prompt_template: str = Field("{prompt}", description="user turn; {prompt} is the row's prompt")
    chat_template: Literal["auto", "none"] = Field(
        "auto", description="auto: the tokenizer's chat template if it has one"
    )
    reward: Literal["exact", "prefix", "match", "math_verify", "final_number", "callable"] = Field(
        "exact",
        description="prefix: share of leading characters that are right; match: share of positions that are right; "
        'final_number: ends with "#### " and the right number, 0.1 for another number',
    )
    callable: str | None = Field(
        None, description='reward = "callable": "module:function", called with (prompt, response, answer)'
    )
    reward_timeout: Seconds = Field(10.0, validate_default=True, description="a verifier that runs longer is killed")
    reward_workers: int = Field(1, ge=1, le=64)

    @model_validator(mode="after")
    def _complete(self) -> "TaskSection":
        if self.source == "jsonl" and self.path is None:
            raise ValueError('task.path is needed for source = "jsonl"')
        if self.source == "copy" and self.min_length > self.max_length:
            raise ValueError("task.min_length must not exceed task.max_length")
        if self.reward == "callable" and not self.callable:
            raise ValueError('task.callable is needed for reward = "callable"')
        return self


class AlgorithmSection(Section):
    name: Literal["grpo", "ppo"] = Field("grpo", description="ppo: for planning only")
    mode: Literal["async", "sync"] = Field("async", description="sync is eta = 0")
    eta: int = Field(4, ge=0, le=64, description="staleness bound in optimiser steps")
    stale_policy: Literal["mask", "wait", "drop"] = Field(
        "mask", description="what the trainer does with tokens older than eta"
    )
    prompts_per_step: int = Field(32, ge=1)
    responses_per_prompt: int = Field(8, ge=2)
    objective: Literal["decoupled", "ppo"] = Field(
        "decoupled", description="decoupled: clip around the proximal policy, weight by proximal/behaviour"
    )
    reference_model: bool = Field(False, description="for planning only: one more forward pass, of a fixed reference")
    reward_model: bool = Field(False, description="for planning only: a model rewards, not a rule")
    reward_time: Seconds = Field(
        0.0,
        validate_default=True,
        description="seconds a rule takes on the CPU to reward a response; plans add the last response's to a step",
    )
    update_mode: Literal["rolling", "pause", "overlapped"] = Field(
        "rolling", description="who waits for new weights: the replica, everybody, nobody; a run is rolling"
    )
    kv_on_update: Literal["recompute", "keep"] = Field(
        "recompute", description="what new weights do to the KV cache of running samples; the torch engine recomputes"
    )
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = Field(0, ge=0, description="linear rise to learning_rate; 0: none")
    decay_steps: int = Field(0, ge=0, description="linear fall to learning_rate_min after the rise; 0: none")
    learning_rate_min: float = Field(0.0, ge=0, description="where decay_steps ends and the rate stays")
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.28, gt=0)
    importance_cap: float = Field(
        5.0, gt=0, description="truncation of the proximal/behaviour and engine/trainer ratio"
    )
    entropy_coefficient: float = Field(0.0, ge=0)
    grad_norm_max: float = Field(1.0, gt=0)
    normalise_advantage: bool = Field(True, description="divide by the group's standard deviation")
    micro_batch_tokens: int = Field(65536, ge=1)

    @model_validator(mode="after")
    def _schedule(self) -> "AlgorithmSection":
        if self.decay_steps and self.learning_rate_min > self.learning_rate:
            raise ValueError("algorithm.learning_rate_min must not exceed algorithm.learning_rate")
        return self

    @property
    def bound(self) -> int:
        """The staleness bound in force."""
        return 0 if self.mode == "sync" else self.eta


class TrainerSection(Section):
    """How a training step is computed. Nothing here changes what is computed, rounding apart."""

    max_world: int | None = Field(
        None, ge=1, description="most devices the trainer gets; default: 1 on paced devices and CPUs, else no limit"
    )
    checkpoint_every_steps: int = Field(
        1,
        ge=1,
        le=64,
        description="steps between two checkpoints; 1: each step is on disk before the next, more: they are written beside the training; "
        "after a crash steps in no complete one (at most twice as many) are made again from the ledger's batches",
    )
    meet_deadline: Seconds = Field(
        180.0, validate_default=True, description="for all ranks to come up and find each other"
    )
    collective_deadline: Seconds = Field(
        300.0, validate_default=True, description="of one exchange between ranks; a rank that is silent longer ends all"
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto", description="compute layers again in the backward pass; auto: as many as memory asks for"
    )
    compile: Literal["auto", "on", "off"] = Field("auto", description="torch.compile; auto: on a GPU")
    attention: Literal["auto", "by_length", "varlen", "sdpa", "cudnn", "flex"] = Field(
        "auto",
        description="kernel for packed samples; auto: on a GPU by_length (cuDNN for long samples, varlen for the rest) from the "
        "Hopper generation on, else varlen (flash attention); else sdpa",
    )


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(16, ge=1)
    max_running: int = Field(
        128, ge=1, description="most samples a replica decodes at once; memory and plan may say fewer"
    )


class RolloutSection(Section):
    """The engine that generates."""

    engine: Literal["torch", "vllm"] = Field(
        "torch", description="torch: our own; vllm: needs the package vllm and a model of a Hugging Face shape"
    )
    max_tp: int = Field(1, ge=1, le=8, description="vllm: most devices of one replica, all in one machine")
    gpu_memory_share: float = Field(
        0.85, gt=0, le=0.98, description="vllm on a GPU: share of the card for weights, KV cache and activations"
    )
    kv_cache: Bytes = Field(2**30, validate_default=True, description="vllm on a CPU: the KV cache, in whole GiB")
    batched_tokens: int = Field(8192, ge=64, description="vllm: most tokens of one engine step")
    eager: bool | None = Field(
        None, description="vllm: no compiling and no CUDA graphs; default: on a CPU, where compiling takes longer"
    )
    start_deadline: Seconds = Field(
        280.0, validate_default=True, description="vllm: for the engine to come up with a sampled token"
    )
    token_deadline: Seconds = Field(
        60.0, validate_default=True, description="vllm: an engine that samples no token for so long is ended"
    )


class WeightsSection(Section):
    """How new weights reach the engines."""

    path: Literal["auto", "store", "direct"] = Field(
        "auto",
        description="store: by disk; direct: straight from the trainer, by disk for joiners and when that fails; "
        "auto: direct from a GPU to engines that are all on GPUs of its kind, else store",
    )
    bucket: Bytes = Field(256 * 2**20, validate_default=True, description="direct: bytes sent at a time")
    deadline: Seconds = Field(
        30.0, validate_default=True, description="direct: a transfer that takes longer is given up, and goes by disk"
    )
    full_every: int = Field(
        1, ge=1, description="store: every so many versions all weights are written, between them what changed"
    )


class EvaluationSection(Section):
    every_steps: int = Field(0, ge=0, description="0: never")
    prompts: int = Field(64, ge=1)


class LengthsSection(Section):
    """What the planner assumes of lengths, in tokens."""

    prompt_mean: float = Field(16, gt=0)
    prompt_max: int = Field(64, ge=1)
    response_mean: float = Field(16, gt=0)
    response_cv: float = Field(0.5, ge=0)
    response_max: int | None = Field(None, ge=1, description="default: sampling.max_new_tokens")


class KindSection(Section):
    peak_flops: Flops
    hbm: BytesPerS
    memory: Bytes
    link: BytesPerS
    launch: Seconds = Field(2e-5, validate_default=True, description="floor of one layer in a decode step")
    train_efficiency: float = Field(1.0, gt=0, description="measured over modelled training rate; 1: not calibrated")
    price_usd_per_h: Price | None = None


class DeviceSection(Section):
    kind: str
    count: int = Field(1, ge=1, le=100_000)
    node: str = Field("n0", description="{i} is replaced by the node's number when per_node is set")
    per_node: int | None = Field(None, ge=1)
    region: str = "local"
    host_memory: Bytes | None = Field(None, description="RAM of each of these machines; default: not checked")


class LinkSection(Section):
    """A class of links. Latency is written one way or as a round trip, whichever was measured."""

    latency: Seconds | None = Field(None, description="one way; default inside a region: 10 us")
    round_trip: Seconds | None = Field(None, description="instead of latency: there and back, as ping prints it")
    bandwidth: BytesPerS = Field(description="one way, of one stream")
    streams: int = Field(1, ge=1, le=1024, description="parallel streams a transfer may use, at that bandwidth each")

    @model_validator(mode="after")
    def _one_latency(self) -> Self:
        if self.latency is not None and self.round_trip is not None:
            raise ValueError("latency and round_trip are both given; write one (a round trip is twice the latency)")
        return self

    @property
    def one_way_s(self) -> float:
        """Latency one way in seconds."""
        if self.round_trip is not None:
            return self.round_trip / 2
        return 1e-5 if self.latency is None else self.latency


class FarLinkSection(LinkSection):
    """Links between two regions, the same in both directions. There is no usual distance: the latency must be given."""

    egress_usd_per_gb: Price = Field(0.0, description="billed for each decimal gigabyte that leaves a region over it")

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.latency is None and self.round_trip is None:
            raise ValueError("latency or round_trip is needed between regions")
        return self


class RegionsSection(FarLinkSection):
    """The link of one pair of regions."""

    between: tuple[str, str] = Field(description='two regions, as fleet.devices names them: ["us-east", "eu-west"]')


class FleetSection(Section):
    source: Literal["auto", "gpus", "cpu", "paced", "declared", "simulated"] = Field(
        "auto",
        description="auto: free GPUs, else what `devices` says; declared: for planning only; "
        "simulated: no work is done, in virtual time",
    )
    devices: tuple[DeviceSection, ...] = ()
    kinds: dict[str, KindSection] = {}
    prices: dict[str, Price] = Field({}, description="USD per hour by kind, over the catalogue's")
    gpu_parts: int | None = Field(
        None,
        ge=1,
        le=8,
        description="devices that a GPU counts as: they take turns on it, each with its part of the memory; "
        "default: 2 where one GPU alone is free, else 1 (1 of declared devices)",
    )
    pacing: Path | None = Field(None, description="paced: file with the declared speeds, read by the devices only")
    intra_node_latency: Seconds = Field(1e-5, validate_default=True, description="one way, inside a machine")
    same_kind: LinkSection | None = Field(
        None, description="between machines with one kind, in a region; default: 100 Gbit/s, 100 us"
    )
    cross_kind: LinkSection | None = Field(
        None, description="between machines of different kinds, in a region; default: same_kind"
    )
    cross_region: FarLinkSection | None = Field(
        None, description="between regions that `regions` does not pair; default: 5 Gbit/s, 30 ms one way"
    )
    regions: tuple[RegionsSection, ...] = Field((), description="the link of each pair of regions, for both directions")

    @model_validator(mode="after")
    def _complete(self) -> "FleetSection":
        if self.source in ("paced", "declared", "simulated") and not self.devices:
            raise ValueError(f'fleet.devices is needed for source = "{self.source}"')
        if self.source == "paced" and self.pacing is None:
            raise ValueError('fleet.pacing is needed for source = "paced"')
        return self


class PlannerSection(Section):
    scheduler: str = "hex"
    objective: Literal["throughput", "throughput_per_dollar"] = "throughput"
    floor_tokens_per_s: float | None = Field(None, gt=0)
    capabilities: Literal["runtime", "unrestricted"] = Field(
        "runtime", description="runtime: what `hexctl up` can run; unrestricted: any plan of the plan space"
    )
    mixed_ranks: bool = Field(
        False,
        description="the trainer's DP ranks may be of two kinds, with token shares by speed; no export can say so",
    )
    weights_full_every: int = Field(
        1,
        ge=1,
        description="with unrestricted: one weight update in so many carries all weights, the others what changed; 1: all do",
    )
    solve_time: Seconds = Field(10.0, validate_default=True, description="seconds the planner process may take")
    calibration: Path | None = Field(
        None, description='file of `hexctl profile`; default: calibration.json in run.root if there; "none": none'
    )

    @model_validator(mode="after")
    def _runnable(self) -> "PlannerSection":
        if self.weights_full_every > 1 and self.capabilities == "runtime":
            raise ValueError(
                'planner.weights_full_every needs planner.capabilities = "unrestricted": a run goes by weights.full_every'
            )
        return self


class ConsentSection(Section):
    mode: Literal["auto", "ask"] = "auto"
    proposal_expires: Seconds = Field(120.0, validate_default=True)


class DriftSection(Section):
    """When a device counts as slow, and when that leads to another plan. Shares are of the speed of its peers, or its own
    before."""

    replan: bool = Field(True, description="plan for slow devices; false: drift is shown, and nothing follows from it")
    enter_share: float = Field(0.85, gt=0, lt=1, description="slow: at or below this share")
    enter: Seconds = Field(30.0, validate_default=True, description="for so long; each recovery doubles it")
    leave_share: float = Field(0.95, gt=0, le=1, description="fast again: at or above this share")
    leave: Seconds = Field(120.0, validate_default=True, description="for so long")
    cooldown: Seconds = Field(120.0, validate_default=True, description="from one planning for drift to the next")
    payback: Seconds = Field(1800.0, validate_default=True, description="a move must have paid within that")
    margin: float = Field(1.5, gt=0, description="it must earn so many times what it costs")
    retry: Seconds = Field(
        1800.0,
        validate_default=True,
        description="a slow device that nobody could judge for so long is tried again; each recovery doubles it",
    )


class SimulationSection(Section):
    """A run that is simulated: `fleet.source = "simulated"`."""

    speed: float = Field(60.0, gt=0, le=1e6, description="virtual seconds that pass in a second")


class Config(Section):
    """One file, one run."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    weights: WeightsSection = WeightsSection()
    evaluation: EvaluationSection = EvaluationSection()
    lengths: LengthsSection = LengthsSection()
    fleet: FleetSection = FleetSection()
    planner: PlannerSection = PlannerSection()
    consent: ConsentSection = ConsentSection()
    drift: DriftSection = DriftSection()
    simulation: SimulationSection = SimulationSection()
