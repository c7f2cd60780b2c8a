"""Rows of metrics.jsonl and samples.jsonl: what an RL engineer reads."""

from collections.abc import Sequence
from itertools import groupby

from runtime.rl.flow.evaluation import response_text
from runtime.rl.flow.figures import decode_figures, staleness
from runtime.rl.flow.state import FlowState
from runtime.rl.ledger import GroupRow, StepRow
from runtime.rl.types import TrainBatch, TrainSample


def metrics_row(state: FlowState, row: StepRow, batch: TrainBatch | None) -> dict[str, object]:
    """One line a step: flow's figures, then the trainer's own. Without the batch (after a crash) some are missing."""
    figures = decode_figures(row.figures)
    age = staleness(figures.ages)
    result: dict[str, object] = {
        "step": row.step,
        "version": row.step + 1,
        "lineage": row.lineage,
        "reward_mean": figures.reward_mean,
        "samples": figures.samples,
        "trained_tokens": figures.trained_tokens,
        "masked_tokens": figures.masked_tokens,
        "staleness_mean": age.mean,
        "staleness_p95": age.p95,
        "staleness_max": age.most,
        "two_versions_share": figures.two_versions / figures.samples if figures.samples else None,
    }
    if batch is not None:
        now = state.clock()
        trained_per_s = state.trained.per_s(now)
        result |= {
            "response_tokens_mean": _mean([len(s.tokens) for s in batch.samples]),
            "truncated_share": _mean([s.finish == "length" for s in batch.samples]),
            "generated_tokens_per_s": state.generated.per_s(now),
            "trained_tokens_per_s": trained_per_s,
            "trainer_wait_share": state.trainer_waits.mean(now),
            "admission_wait_share": state.admission_waits.mean(now),
            "queue_groups": len(state.ledger.book.complete),
            "usd_per_mtok": usd_per_mtok(state.usd_per_h, trained_per_s),
        }
        result |= state.spent.take()
    return result | dict(row.metrics)


def usd_per_mtok(usd_per_h: float | None, tokens_per_s: float) -> float | None:
    """Price of a million trained tokens; None without a price or without tokens."""
    return None if usd_per_h is None or tokens_per_s <= 0 else usd_per_h / 3600 / tokens_per_s * 1e6


def sample_rows(state: FlowState, batch: TrainBatch, group: GroupRow) -> list[dict[str, object]]:
    """The samples of one group of a step, a row each. `versions` are spans of (tokens, version)."""
    return [_sample_row(state, batch.step, s, group) for s in batch.samples if s.sample.group == group.ordinal]


def _sample_row(state: FlowState, step: int, s: TrainSample, group: GroupRow) -> dict[str, object]:
    return {
        "step": step,
        "group": s.sample.group,
        "member": s.sample.member,
        "prompt": group.prompt,
        "response": response_text(state, s.tokens),
        "answer": group.answer,
        "reward": s.reward,
        "advantage": s.advantage,
        "finish": s.finish,
        "versions": [[len(list(run)), version] for version, run in groupby(s.versions)],
        "masked_tokens": sum(w != 1.0 for w in s.weights),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
