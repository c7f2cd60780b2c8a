"""From a configuration to the planner's problem. Pure: the pacing file is never read here, it belongs to the devices."""

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, DeviceKind, Link
from planner.model import ModelSpec
from planner.override import Override
from planner.plan import Plan
from planner.problem import AttentionKernel, Capabilities, Problem
from planner.record import replace
from planner.workload import Lengths, Workload
from runtime.cards import divided
from runtime.config.schema import Config, DeviceSection, FarLinkSection, KindSection, LinkSection, RegionsSection
from runtime.errors import ConfigError

if TYPE_CHECKING:  # it costs numpy to import
    from planner.calibration import Calibration

# Assumption where the file names no link: 100 Gbit/s Ethernet between machines.
DEFAULT_LINK = Link(latency_s=1e-4, bytes_per_s=1.25e10)
# Assumption where it names none between regions: as far as across a continent or the Atlantic.
DEFAULT_CROSS_REGION = Link(latency_s=0.03, bytes_per_s=6.25e8)
ROW_CEILING = 32768  # tokens of a micro-batch on a GPU, as `runtime.rl.train.room` has it (which imports torch)
LONG = 2048  # tokens from which "by_length" takes cuDNN, as `runtime.rl.model.attention` has it (likewise)
HOST_CPU = "host-cpu"  # the kind of a CPU that stands in for a device
PREFIX_BLOCK, PREFIX_BLOCK_CPU = 16, 32  # tokens of vLLM's KV blocks: its own choice on a GPU, ours on a CPU
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def cluster_from_config(config: Config) -> Cluster:
    """The fleet as the file declares it (`declared`, `paced`, or `devices` given for another source).

    Devices are called "<node>/gpu<i>", paced ones "paced-<node>-<i>"; without devices, `cpu` is one "cpu-n0-0".
    Raises ConfigError for a kind nobody knows, a node template without its number, or a fleet that is only known
    once it has been looked at.
    """
    fleet = config.fleet
    sections = fleet.devices
    if not sections and fleet.source == "cpu":
        sections = (DeviceSection(kind=HOST_CPU),)
    if not sections:
        raise ConfigError(
            "the fleet is only known where it runs",
            where="fleet.devices",
            expected="devices in the file",
            hint='for planning, list [[fleet.devices]] and set fleet.source = "declared"',
        )
    kinds = {name: kind_from_config(config, name) for name in dict.fromkeys(s.kind for s in sections)}
    for name in fleet.prices:
        if name not in kinds and name not in CATALOGUE and name not in fleet.kinds:
            raise ConfigError(
                "price of an unknown kind", where=f"fleet.prices.{name}", got=name, expected=", ".join(kinds)
            )
    devices, host_memory = _devices(sections, fleet.source)
    described = fleet.source in ("declared", "simulated")  # elsewhere parts are of the GPUs that are found
    whole = Cluster(
        kinds=kinds,
        devices=devices,
        host_memory_bytes=host_memory,
        same_kind=link_from(fleet.same_kind),
        cross_kind=link_from(fleet.cross_kind or fleet.same_kind),
        cross_region=link_from(fleet.cross_region, default=DEFAULT_CROSS_REGION),
        regions=_regions(fleet.regions, {s.region for s in sections}),
        intra_node_latency_s=fleet.intra_node_latency,
    )
    return divided(whole, fleet.gpu_parts or 1) if described else whole


def problem_from_config(
    config: Config,
    cluster: Cluster,
    model: ModelSpec,
    *,
    overrides: tuple[Override, ...] = (),
    in_force: Plan | None = None,
    calibration: "Calibration | None" = None,
) -> Problem:
    """The planner's problem for this configuration on that cluster, with kinds as fast as `calibration` says.

    The model is planned in the dtype it generates with; `shape` models keep the dtype of their own config. Raises
    ConfigError (or the planner's InvalidInput) for values that cannot go together.
    """
    if config.model.source != "shape":
        dtype = config.model.rollout_dtype or config.model.dtype
        model = replace(model, dtype_bytes=_DTYPE_BYTES[dtype])
    planner = config.planner
    capabilities = Capabilities(
        train_mixed_dp=planner.mixed_ranks,
        task_groups=2,
        colocate=True,
        weights_full_every=planner.weights_full_every,
    )  # the whole plan space
    if planner.capabilities == "runtime":
        capabilities = runtime_capabilities(config, cluster)
    elif config.fleet.source == "simulated":
        capabilities = Capabilities(
            weights_full_every=planner.weights_full_every
        )  # any shape, with the roles that a run has
    problem = Problem(
        cluster=cluster,
        model=model,
        workload=workload_from_config(config),
        capabilities=capabilities,
        overrides=overrides,
        objective=planner.objective,
        floor_tokens_per_s=planner.floor_tokens_per_s,
        in_force=in_force,
        seed=config.run.seed,
    )
    if calibration is not None:
        from planner.calibrated import kernels_of

        problem = replace(problem, calibration=kernels_of(calibration))
    if planner.capabilities != "runtime" or (calibration is None and all(k.paced for k in cluster.kinds.values())):
        return problem
    from planner.calibrated import assumed, calibrated

    engine = engine_name(config)
    problem = assumed(problem, engine)
    return problem if calibration is None else calibrated(problem, calibration, engine)


def engine_name(config: Config) -> str:
    """What generates on a GPU, as rates of a calibration name it."""
    rollout = config.rollout
    return "vllm-eager" if rollout.engine == "vllm" and rollout.eager else rollout.engine


def runtime_capabilities(config: Config, cluster: Cluster) -> Capabilities:
    """What `hexctl up` can run: replicas of the configured engine, and a trainer of DP ranks of one device each whose parameters
    are spread over them. Ranks on paced devices and CPUs share one host, so there is one unless the file asks for more."""
    most = config.trainer.max_world
    if most is None and any(k.paced or k.name == HOST_CPU for k in cluster.kinds.values()):
        most = 1
    tp = config.rollout.max_tp if config.rollout.engine == "vllm" else 1
    if any(k.part_of for k in cluster.kinds.values()):  # cards in parts: NCCL takes no card twice
        most = tp = 1
    return replace(
        Capabilities.single_device_roles(),
        rollout_max_tp=tp,
        rollout_max_running=config.sampling.max_running,
        rollout_prefix_block=_prefix_block(config, cluster),
        train_max_devices=most,
        train_mixed_dp=config.planner.mixed_ranks and most != 1,
        trainer="replicated" if most == 1 else "fsdp",
        train_row_tokens=_row_tokens(config, cluster),
        direct_updates=_direct(config, cluster),
        train_attention=_attention(config),
        # Straight to the engines, and of several ranks, all weights go.
        weights_full_every=config.weights.full_every if config.weights.path == "store" and most == 1 else 1,
    )


def _direct(config: Config, cluster: Cluster) -> bool:
    """Whether weights go straight to the engines; `auto` does so between GPUs of one kind."""
    kinds = cluster.kinds.values()
    if config.weights.path != "auto":
        return config.weights.path == "direct"
    return len({k.base for k in kinds}) == 1 and not any(k.paced or k.base == HOST_CPU for k in kinds)


def _prefix_block(config: Config, cluster: Cluster) -> int | None:
    """Tokens of the blocks in which samples of a group share their prompt; the torch engine keeps a row for each sample."""
    if config.rollout.engine != "vllm":
        return None
    return PREFIX_BLOCK_CPU if any(k.paced or k.name == HOST_CPU for k in cluster.kinds.values()) else PREFIX_BLOCK


def _attention(config: Config) -> AttentionKernel:
    """The trainer's attention kernel from the Hopper generation on, by the mean sample."""
    wanted, lengths = config.trainer.attention, config.lengths
    long = lengths.prompt_mean + lengths.response_mean >= LONG
    return "cudnn" if wanted == "cudnn" or (wanted in ("auto", "by_length") and long) else "flash_2"


def _row_tokens(config: Config, cluster: Cluster) -> int | None:
    """Most tokens of the trainer's micro-batches; on a GPU none is longer than the ceiling. A paced device's clock counts tokens,
    however they are packed."""
    if any(k.paced for k in cluster.kinds.values()):
        return None
    most = config.algorithm.micro_batch_tokens
    return most if HOST_CPU in cluster.kinds else min(most, ROW_CEILING)


def workload_from_config(config: Config) -> Workload:
    """Batch, lengths, models and staleness bound. A mean above its maximum, or PPO planned for what `hexctl up` can run,
    is a ConfigError."""
    lengths, algorithm = config.lengths, config.algorithm
    if algorithm.name == "ppo" and config.planner.capabilities == "runtime":
        raise ConfigError(
            "hexctl up runs grpo only",
            where="algorithm.name",
            got=algorithm.name,
            expected="grpo",
            hint='to plan ppo set planner.capabilities = "unrestricted"',
        )
    response_max = lengths.response_max or config.sampling.max_new_tokens
    for name, mean, most in (
        ("prompt", lengths.prompt_mean, lengths.prompt_max),
        ("response", lengths.response_mean, response_max),
    ):
        if mean > most:
            raise ConfigError(
                f"mean {name} length exceeds the longest",
                where=f"lengths.{name}_mean",
                got=mean,
                expected=f"at most {most}",
                hint="response_max defaults to sampling.max_new_tokens" if name == "response" else "",
            )
    return Workload(
        algorithm=algorithm.name,
        mode=algorithm.mode,
        prompts_per_step=algorithm.prompts_per_step,
        responses_per_prompt=algorithm.responses_per_prompt,
        prompt=Lengths(mean_tokens=lengths.prompt_mean, max_tokens=lengths.prompt_max),
        response=Lengths(mean_tokens=lengths.response_mean, cv=lengths.response_cv, max_tokens=response_max),
        eta=algorithm.bound,
        reference_model=algorithm.reference_model,
        reward="model" if algorithm.reward_model else "rule",
        reward_s_per_sample=algorithm.reward_time,
        kv_on_update=algorithm.kv_on_update,
        update_mode=algorithm.update_mode,
        checkpoint_every=config.trainer.checkpoint_every_steps,
        # Our trainer makes one optimiser step a batch: its proximal policy is the current one, at no cost. What a paced
        # device declares is of a step with two passes.
        proximal_forward=algorithm.objective == "decoupled"
        and (config.planner.capabilities != "runtime" or config.fleet.source == "paced"),
    )


def kind_from_config(config: Config, name: str) -> DeviceKind:
    """The device kind of that name as the configuration knows it: declared, or of the catalogue, with its price."""
    fleet = config.fleet
    declared = fleet.kinds.get(name)
    if declared is not None:
        kind = _declared(name, declared, paced=fleet.source == "paced")
    elif name in CATALOGUE and fleet.source != "paced":
        kind = CATALOGUE[name]
    else:
        known = fleet.kinds if fleet.source == "paced" else {**fleet.kinds, **CATALOGUE}
        number = next((i for i, s in enumerate(fleet.devices) if s.kind == name), 0)
        raise ConfigError(
            "unknown device kind",
            where=f"fleet.devices.{number}.kind",
            got=name,
            expected=", ".join(known),
            hint=f"declare [fleet.kinds.{name}] with peak_flops, hbm, memory and link",
        )
    if name in fleet.prices:
        kind = replace(kind, price_usd_per_h=fleet.prices[name])
    return kind


def _declared(name: str, section: KindSection, *, paced: bool) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_flops=section.peak_flops,
        hbm_bytes_per_s=section.hbm,
        memory_bytes=section.memory,
        link_bytes_per_s=section.link,
        launch_s=section.launch,
        train_efficiency=section.train_efficiency,
        price_usd_per_h=section.price_usd_per_h,
        source="declared in the configuration",
        paced=paced,
    )


def link_from(section: LinkSection | None, *, default: Link = DEFAULT_LINK) -> Link:
    """The planner's link (one way, SI) for a table of the file; `default` where there is none."""
    if section is None:
        return default
    return Link(
        latency_s=section.one_way_s,
        bytes_per_s=section.bandwidth,
        streams=section.streams,
        egress_usd_per_gb=section.egress_usd_per_gb if isinstance(section, FarLinkSection) else 0.0,
    )


def _regions(sections: tuple[RegionsSection, ...], known: Collection[str]) -> Mapping[tuple[str, str], Link]:
    """Links by sorted pair of regions; ConfigError for a region without devices and for a pair that is written twice."""
    found: dict[tuple[str, str], Link] = {}
    for number, section in enumerate(sections):
        where, pair = f"fleet.regions.{number}.between", tuple(sorted(section.between))
        a, b = pair
        for name in section.between:
            if name not in known:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                raise ConfigError(
                    "unknown region",
                    where=where,
                    got=name,
                    expected=", ".join(sorted(known)),
                    hint=f"did you mean {close[0]}?" if close else "a region is named by fleet.devices.region",
                )
        if a == b:
            raise ConfigError(
                "a region is paired with itself",
                where=where,
                got=a,
                expected="two regions",
                hint="fleet.same_kind and fleet.cross_kind are the links inside a region",
            )
        if (a, b) in found:
            raise ConfigError(
                "the same pair of regions twice",
                where=where,
                got=" and ".join(section.between),
                expected="each pair once",
                hint="one table serves both directions",
            )
        found[(a, b)] = link_from(section)
    return found


def _devices(sections: tuple[DeviceSection, ...], source: str) -> tuple[tuple[Device, ...], dict[str, float]]:
    """Expand counts; and what is said of machines' memory. Numbering goes on where sections share a node or a node template."""
    out: list[Device] = []
    host: dict[str, float] = {}
    on_node: dict[str, int] = {}
    machines: dict[str, int] = {}
    for number, s in enumerate(sections):
        if s.per_node is not None and "{i}" not in s.node and s.count > s.per_node:
            raise ConfigError(
                "several machines need numbered names",
                where=f"fleet.devices.{number}.node",
                got=s.node,
                expected='a name with "{i}", such as "a{i}"',
            )
        per_node = s.per_node or s.count
        for start in range(0, s.count, per_node):
            node = s.node
            if "{i}" in node:
                node = node.replace("{i}", str(machines.get(s.node, 0)))
                machines[s.node] = machines.get(s.node, 0) + 1
            if s.host_memory is not None and host.setdefault(node, s.host_memory) != s.host_memory:
                raise ConfigError(
                    f"machine {node!r} is said to have two amounts of memory",
                    where=f"fleet.devices.{number}.host_memory",
                    got=s.host_memory,
                    expected=f"{host[node]:.0f} bytes, as an entry before says",
                )
            for _ in range(min(per_node, s.count - start)):
                i = on_node.get(node, 0)
                on_node[node] = i + 1
                name = {"paced": f"paced-{node}-{i}", "cpu": f"cpu-{node}-{i}"}.get(source, f"{node}/gpu{i}")
                out.append(Device(id=name, kind=s.kind, node=node, region=s.region, index=i))
    return tuple(out), host
