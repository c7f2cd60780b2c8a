"""Reading a market file: what can be rented, as TOML decoded with pydantic.

    [market]
    name = "example"
    source = "price list"
    as_of = "2024-07"
    [[instances]]
    name = "p4d.24xlarge"
    region = "us-east-1"
    kind = "A100-40"
    gpus = 8
    price_usd_per_h = 32.77
    spot_usd_per_h = 12.1     # left out: not offered on spot
    available = 16            # left out: no limit is known
    node_memory = "1152 GB"   # left out: not known
    [[egress]]
    from = "us-east-1"
    to = "us-west-2"
    usd_per_gb = 0.02

Unknown keys are errors. Effects are reads only.
"""

import json
import tomllib
from pathlib import Path

from pydantic import Field, ValidationError

from planner.catalogue import CATALOGUE
from planner.cluster import DeviceKind
from planner.errors import HexError
from planner.market import Egress, Instance, Market
from runtime.config.problem import kind_from_config
from runtime.config.schema import Bytes, Config, Price, Section
from runtime.errors import ConfigError


class MarketSection(Section):
    name: str = Field("market", min_length=1)
    source: str = ""
    as_of: str = ""


class InstanceSection(Section):
    name: str = Field(min_length=1)
    region: str = "local"
    kind: str
    gpus: int = Field(ge=1, le=1024)
    price_usd_per_h: Price
    spot_usd_per_h: Price | None = None
    available: int | None = Field(None, ge=0)
    node_memory: Bytes | None = None


class EgressSection(Section):
    origin: str = Field(alias="from")
    to: str
    usd_per_gb: Price


class MarketFile(Section):
    market: MarketSection = MarketSection()
    instances: tuple[InstanceSection, ...] = ()
    egress: tuple[EgressSection, ...] = ()


def load_market(path: Path) -> Market:
    """The market of a file. ConfigError names the file and every fault."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", where=str(path), hint="--market names a file") from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"not TOML: {e}", where=str(path)) from e
    try:
        file = MarketFile.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as e:
        raise ConfigError(_faults(e), where=str(path)) from e
    except ValueError as e:  # a number that is not finite
        raise ConfigError(str(e), where=str(path)) from e
    try:
        return _market(file)
    except HexError as e:
        raise ConfigError(e.what, where=str(path), got=e.got, expected=e.expected, hint=e.hint) from e


def _market(file: MarketFile) -> Market:
    return Market(
        name=file.market.name,
        source=file.market.source,
        as_of=file.market.as_of,
        instances=tuple(
            Instance(
                name=i.name,
                kind=i.kind,
                gpus=i.gpus,
                region=i.region,
                usd_per_h=i.price_usd_per_h,
                spot_usd_per_h=i.spot_usd_per_h,
                available=i.available,
                node_memory_bytes=i.node_memory,
            )
            for i in file.instances
        ),
        egress=tuple(Egress(origin=e.origin, to=e.to, usd_per_gb=e.usd_per_gb) for e in file.egress),
    )


def kinds_for(config: Config, market: Market) -> dict[str, DeviceKind]:
    """The kinds of a market's devices that the configuration or the catalogue knows."""
    names = dict.fromkeys(i.kind for i in market.instances)
    return {n: kind_from_config(config, n) for n in names if n in CATALOGUE or n in config.fleet.kinds}


def _faults(error: ValidationError) -> str:
    """Each fault with its key, in one line."""
    texts = []
    for detail in error.errors(include_url=False):
        key = ".".join(str(p) for p in detail["loc"])
        message = (
            "unknown key" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Input should be ")
        )
        given = "" if detail["type"] in ("missing", "extra_forbidden") else f", got {detail['input']!r}"
        texts.append(f"{key}: {message}{given}")
    return "; ".join(texts)
