"""A profile's document as text. Pure."""

from collections.abc import Mapping
from typing import Any

from hexctl.cli.render.text import DASH, duration, number, size, table
from planner.explain import UNEVEN


def profile_text(document: Mapping[str, Any]) -> str:
    """What was measured, or would be, node by node; then the figures by kind."""
    lines = _agenda_lines(document) if document["dry_run"] else _kind_lines(document)
    for node in document["nodes"]:
        if node["failure"]:
            lines.append(f"{node['node']} is left out: {node['failure']}")
        lines += [f"{node['node']}: {note}" for note in node["notes"]]
    lines += document["notes"]
    if not document["dry_run"] and document["file"] is not None:
        lines += ["", f"written to {document['file']}; hexctl plan and hexctl up count with it"]
    return "\n".join(lines)


def _agenda_lines(document: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for node in document["nodes"]:
        rows = [(i["kind"], i["what"], f"{i['seconds']:.0f} s") for i in node["items"]]
        lines += [f"{node['node']}: {len(rows)} items, about {node['expected_s']:.0f} s", ""]
        lines += [table(("KIND", "WHAT", "ABOUT"), rows, right=(2,)), ""]
    return lines


def _kind_lines(document: Mapping[str, Any]) -> list[str]:
    if not document["kinds"]:
        return ["nothing was measured"]
    headers = ("KIND", "HOW", "POINTS", "MATMUL", "COPY", "DECODE ATTN", "ALL-REDUCE", "DEVICE")
    rows = [
        (
            k["kind"], k["how"], number(k["points"]), _flops(k["gemm_flops"]), _rate(k["copy_bytes_per_s"]),
            _rate(k["decode_attention_bytes_per_s"]), _reduce(k), k["device"],
        )
        for k in document["kinds"]
    ]  # fmt: skip
    rates = [
        (k["kind"], e["model"], _generating(e), number(e["tokens_per_s"]))
        for k in document["kinds"]
        for e in k["engine"]
    ]
    rates += [
        (k["kind"], r["model"], _training(r), number(r["tokens_per_s"]))
        for k in document["kinds"]
        for r in k["trainer"]
    ]
    lines = [table(headers, rows, right=(2, 3, 4, 5, 6))]
    if rates:
        lines += ["", table(("KIND", "MODEL", "WORK", "TOKENS/S"), rates, right=(3,))]
    stops = [
        (k["kind"], u["model"], f"new weights, {u['path']} ({u['engine']})", _seconds(u["swap_s"]))
        for k in document["kinds"]
        for u in k.get("updates", ())
    ]
    stops += [
        (k["kind"], r["model"], "a checkpoint", _seconds(seconds))
        for k in document["kinds"]
        for seconds, r in {r["checkpoint_s"]: r for r in k["trainer"] if r.get("checkpoint_s")}.items()
    ]
    if stops:
        lines += ["", table(("KIND", "MODEL", "STOPS FOR", "TIME"), stops, right=(3,))]
    if document.get("met"):
        heads = ("KIND", "OF THE RUN", "MEASURED", "PREDICTED", "OFF")
        lines += ["", table(heads, [_met(m) for m in document["met"]], right=(2, 3, 4))]
    links = [
        (k["kind"], path.replace("_", " "), _rate(v))
        for k in document["kinds"]
        for path, v in k["links_bytes_per_s"].items()
    ]
    if links:
        lines += ["", table(("KIND", "LINK", "BYTES/S"), links, right=(2,))]
    took = [n["seconds"] for n in document["nodes"] if n["seconds"] is not None]
    return [*lines, "", f"measured in {duration(max(took))}" if took else ""]


def _met(m: Mapping[str, Any]) -> tuple[str, ...]:
    """A rate beside what a plan will say of it."""
    measured, predicted = m["measured_tokens_per_s"], m["predicted_tokens_per_s"]
    return m["kind"], m["what"], number(measured), number(predicted), f"{predicted / measured - 1:+.1%}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _generating(rate: Mapping[str, Any]) -> str:
    """What was generated, with how many samples at once, of how many where some waited, and how much slower it was at times."""
    held, slowest = rate.get("held"), rate.get("slowest")
    of = f" of {number(held)}" if held is not None and held > rate["running"] else ""
    slower = f", for seconds {1 - slowest:.0%} slower" if slowest is not None and slowest < 1 - UNEVEN else ""
    return f"{rate['phase']} at {number(rate['running'])}{of}{slower}"


def _training(rate: Mapping[str, Any]) -> str:
    """What was trained, and how, as far as it is known."""
    if rate.get("samples") is None:
        return "training"
    how = [rate["attention"], "compiled"] if rate["compiled"] else [rate["attention"]]
    how += ["layers computed again"] if rate["recompute"] else []
    return f"{rate['samples']} samples in {rate['rows']} rows, {rate['step_s']:.3g} s ({', '.join(how)})"


def _flops(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"


def _rate(value: float | None) -> str:
    return DASH if value is None else f"{size(value)}/s"


def _reduce(kind: Mapping[str, Any]) -> str:
    if kind["all_reduce_bytes_per_s"] is None:
        return DASH
    return f"{_rate(kind['all_reduce_bytes_per_s'])} over {kind['all_reduce_ranks']}"
