"""Loss, gradients and figures of a batch: what a training step computes before the optimiser moves.

Samples are packed into rows, each row goes forward and backward once, and gradients add up: in the parameters' own `grad`, or
for half-precision parameters with float32 masters in the masters', as soon as a parameter's gradient of a row is complete.
The host never waits for the device between rows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.record import record
from runtime.config.schema import TrainerSection
from runtime.errors import first_line
from runtime.rl.model import Decoder
from runtime.rl.model.attention import choose_attention
from runtime.rl.model.packed import Halves, PackedPass
from runtime.rl.train.head import ChunkKernels, Chunks, chunked_loss, has_wide_products
from runtime.rl.train.loss import Objective, policy_loss, token_terms
from runtime.rl.train.metrics import TokenFigures
from runtime.rl.train.packing import MicroBatch, pack, plan_rows, trained
from runtime.rl.train.room import Room, device_room
from runtime.rl.types import TrainSample

ROW_MULTIPLE = 128  # of a row's length on a GPU: matrix kernels are slower on ragged sizes
_log = logging.getLogger(__name__)


@record
class BatchGradients:
    """What the rows of a batch gave; the gradients themselves lie in `grad`."""

    loss: float
    figures: tuple[TokenFigures, ...]
    rows: int
    tokens: int  # that went through the model, without padding


class GradientComputer:
    """Forward and backward of whole batches on one device.

    `model` is a Decoder, or one whose layers and root are sharded (FSDP2): everything that needs parameters happens inside
    its forward. `masters` maps parameter names to what the optimiser holds; a master that is the parameter itself needs no
    second sum. The same samples give the same gradients on a CPU; on a GPU flash attention's backward adds in any order.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: Any,
        objective: Objective,
        temperature: float,
        micro_batch_tokens: int,
        masters: Mapping[str, nn.Parameter],
        options: TrainerSection | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        may_fall_back: bool = True,
    ) -> None:
        """`config`: the model's DecoderConfig. `dtype`: what it computes in; default: its parameters'. `may_fall_back`: a
        compiler that fails is left out; ranks that compute together must not, each for itself."""
        self._model, self._config, self._objective = model, config, objective
        self._options = options or TrainerSection()
        self._device = torch.device(device)
        self._micro_batch_tokens = micro_batch_tokens
        self._masters = dict(masters)
        self._dtype = dtype or next(model.parameters()).dtype
        self._float_dtype = next(iter(self._masters.values())).dtype
        self._factor = config.logit_scale / temperature
        self._compiled = self._options.compile == "on" or (
            self._options.compile == "auto" and self._device.type == "cuda"
        )
        self._proven = not self._compiled or not may_fall_back  # whether a batch has gone through as things stand
        self._note = ""
        self._wide = has_wide_products(self._device, self._dtype)
        self._attention = choose_attention(
            self._options.attention,
            self._device,
            self._dtype,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )
        self._build()
        self._accumulate_in_masters()

    @property
    def facts(self) -> dict[str, str]:
        """What was chosen, for logs and tables."""
        return {
            "attention": self._attention.name,
            "attention_note": self._attention.note,
            "compile": ("on" if self._compiled else "off") + (f" ({self._note})" if self._note else ""),
            "wide_products": "on" if self._wide else "off",
            "head_rows": str(self._room.head_rows),
            "row_tokens": str(self._room.row_tokens),
            "recomputed_layers": f"{self._room.recomputed(self._room.row_tokens)} of {self._config.layers}",
        }

    @property
    def room(self) -> Room:
        """What fits: tokens of a row, layers computed twice."""
        return self._room

    def rows_of(self, samples: Sequence[TrainSample]) -> list[tuple[TrainSample, ...]]:
        """The rows that `compute` cuts the samples into."""
        return plan_rows(trained(samples), self._room.row_tokens)

    def compute(
        self,
        samples: Sequence[TrainSample],
        *,
        step: int,
        denominator: float,
        rounds: int = 0,
        on_row: Callable[[int, int], None] | None = None,
    ) -> BatchGradients:
        """Add the gradient of the samples' loss, divided by `denominator` (weights of the whole global batch), to `grad`.

        `rounds`: at least so many passes are made, those left over with a row of padding; ranks that compute together
        need the same number. `on_row(i, of)` is called before each pass. A compiler that fails at its first batch is
        left out from then on, with a warning, and the batch begins anew.
        """
        try:
            done = self._compute(samples, step, denominator, rounds, on_row)
        except RuntimeError as e:
            if self._proven or isinstance(e, torch.OutOfMemoryError) or not _of_the_compiler(e):
                raise
            self._note = f"failed: {first_line(e)}"
            _log.warning("torch.compile does not work here, training goes on without: %s", first_line(e))
            self._compiled = False
            self._build()
            for p in (*self._model.parameters(), *self._masters.values()):
                p.grad = None
            done = self._compute(samples, step, denominator, rounds, on_row)
        self._proven = True
        return done

    def _build(self) -> None:
        self._halves = Halves(compiled=self._compiled)
        self._kernels = ChunkKernels(compiled=self._compiled, wide_products=self._wide)
        self._room = device_room(
            self._config,
            parameters=[*self._model.parameters()],
            masters=[*self._masters.values()],
            device=self._device,
            dtype=self._dtype,
            micro_batch_tokens=self._micro_batch_tokens,
            compiled=self._compiled,
            checkpointing=self._options.activation_checkpointing,
        )

    def _compute(
        self,
        samples: Sequence[TrainSample],
        step: int,
        denominator: float,
        rounds: int,
        on_row: Callable[[int, int], None] | None,
    ) -> BatchGradients:
        rows = self.rows_of(samples)
        padded = [*rows, *([()] * (rounds - len(rows)))]
        losses: list[Tensor] = []
        figures: list[TokenFigures] = []
        for i, row in enumerate(padded):
            if on_row is not None:
                on_row(i, len(padded))
            # The device works on the row before while the host packs this one.
            piece = pack(
                row,
                step=step,
                dtype=self._float_dtype,
                device=self._device,
                multiple=ROW_MULTIPLE if self._device.type == "cuda" else 1,
            )
            loss, found = self._pass(piece, denominator)
            losses.append(loss)
            figures.append(found)
        return BatchGradients(
            loss=float(torch.stack(losses).double().sum()) if losses else 0.0,
            figures=tuple(figures[: len(rows)]),
            rows=len(padded),
            tokens=sum(len(s.prompt_tokens) + len(s.tokens) for r in rows for s in r),
        )

    def _pass(self, piece: MicroBatch, denominator: float) -> tuple[Tensor, TokenFigures]:
        """Forward and backward of one row."""
        objective = self._objective
        chunks = Chunks(rows=self._room.head_rows, factor=self._factor, kernels=self._kernels)

        def token_loss(at: slice, current: Tensor, entropy: Tensor) -> Tensor:
            # One optimiser step a batch: the current policy is the proximal one, held fixed.
            terms = token_terms(
                current,
                proximal=current.detach(),
                behaviour=piece.behaviour[at],
                advantages=piece.advantages[at],
                objective=objective,
            )
            return policy_loss(
                terms,
                entropy,
                piece.weights[at],
                denominator=denominator,
                entropy_coefficient=objective.entropy_coefficient,
            )

        def head(hidden: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
            del scale  # in the chunks' factor
            return chunked_loss(hidden, weight, piece.targets, chunks, token_loss)

        way = PackedPass(
            row=piece.row,
            attention=self._attention,
            halves=self._halves,
            recomputed=self._room.recomputed(piece.row.tokens.shape[0]),
            wanted=piece.index,
            head=head,
        )
        loss, current, entropy = self._model(piece.row.tokens, packed=way)
        loss.backward()
        terms = token_terms(
            current,
            proximal=current,
            behaviour=piece.behaviour,
            advantages=piece.advantages,
            objective=objective,
        )
        figures = TokenFigures(
            current=current,
            entropy=entropy,
            importance=terms.importance,
            clipped=terms.clipped,
            behaviour=piece.behaviour,
            ages=piece.ages,
        )
        return loss.detach(), figures

    def _accumulate_in_masters(self) -> None:
        """Move each complete gradient of a half-precision parameter into its master's sum at once, and free it."""
        for name, parameter in self._model.named_parameters():
            master = self._masters[name]
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_into(master))  # type: ignore[no-untyped-call]


def of_decoder(model: Decoder, **how: Any) -> GradientComputer:
    """A GradientComputer of a plain decoder."""
    return GradientComputer(model, config=model.config, **how)


def _into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move


def _of_the_compiler(error: BaseException) -> bool:
    """Whether the error comes out of torch.compile or of what it calls."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
