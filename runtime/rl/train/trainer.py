"""The torch trainer: one process, one device, one AdamW step a batch."""

import math
import time
from collections.abc import Generator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.record import record
from runtime.config.schema import AlgorithmSection
from runtime.errors import RunError, WeightsError
from runtime.rl.model import Decoder
from runtime.rl.train import checkpoint
from runtime.rl.train.loss import Objective, policy_loss, token_logprobs, token_terms
from runtime.rl.train.metrics import TokenFigures, batch_metrics, token_metrics
from runtime.rl.train.packing import MicroBatch, micro_batches
from runtime.rl.train.schedule import learning_rate
from runtime.rl.types import CheckpointMark, StepMetrics, TrainBatch, WeightsRef
from runtime.rl.weights import GenerationWriter
from runtime.rl.weights.layout import TensorSpec
from runtime.rl.weights.sealed import sweep


@record
class TrainerCapabilities:
    """What a trainer can do; enters the planner's problem."""

    name: str
    max_world: int


class TorchTrainer:
    """Parameters, AdamW and their place on disk. Implements `runtime.rl.protocols.Trainer`.

    The same batch gives the same update: samples are ordered by themselves, nothing is drawn at random. How the batch is
    cut into micro-batches changes sums in the last bits only. bfloat16 models keep float32 master parameters; gradients
    are summed and moments held in that precision.

    With one optimiser step a batch the current policy *is* the proximal one when the step begins, so proximal logprobs
    are the current ones, detached: no second forward.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        algorithm: AlgorithmSection,
        temperature: float,
        checkpoints: Path,
        weights: Path,
        rollout_dtype: torch.dtype | None = None,
        full_every: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._model = model.to(self._device)
        self._algorithm, self._temperature, self._seed = algorithm, temperature, seed
        self._checkpoints, self._weights, self._rollout_dtype = checkpoints, weights, rollout_dtype
        self._generations = GenerationWriter(weights, full_every=full_every)
        self._objective = Objective(
            decoupled=algorithm.objective == "decoupled",
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_cap=algorithm.importance_cap,
            entropy_coefficient=algorithm.entropy_coefficient,
        )
        self._params = dict(self._model.named_parameters())
        self._masters = {name: _master(p) for name, p in self._params.items()}
        self._optimiser = _adamw(self._masters, algorithm)
        self._version, self._lineage, self._optimiser_steps = 0, 0, 0

    @property
    def capabilities(self) -> TrainerCapabilities:
        """One rank."""
        return TrainerCapabilities(name="torch", max_world=1)

    @property
    def version(self) -> int:
        """Version of the parameters held: optimiser steps behind them."""
        return self._version

    @property
    def lineage(self) -> int:
        """Line of descent of the versions."""
        return self._lineage

    @property
    def parameters_count(self) -> int:
        """Parameters, a tied one once."""
        return sum(p.numel() for p in self._params.values())

    def master_parameters(self) -> Mapping[str, Tensor]:
        """The parameters in master precision, by name. Not copies."""
        return {name: p.detach() for name, p in self._masters.items()}

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """One optimiser step on the whole global batch; turns version `batch.step` into `batch.step + 1`.

        A batch without a trained token, or with a gradient that is not finite, advances the version and leaves parameters
        and optimiser as they are (`update_skipped` 1). RunError when the batch is for another version.
        """
        if batch.step != self._version:
            raise RunError("the batch is for another version", got=batch.step, expected=str(self._version))
        started = time.perf_counter()
        total = sum(w for s in batch.samples for w in s.weights)
        loss, figures = 0.0, []
        for piece in micro_batches(
            batch, max_tokens=self._algorithm.micro_batch_tokens, dtype=self._float_dtype, device=self._device
        ):
            piece_loss, piece_figures = self._accumulate(piece, total)
            loss += piece_loss
            figures.append(piece_figures)
        gradients_s = time.perf_counter() - started
        rate = learning_rate(self._algorithm, batch.step)
        grad_norm, skipped = self._update(rate) if figures else (0.0, True)
        self._version += 1
        return {
            **batch_metrics(batch),
            **token_metrics(figures),
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "update_skipped": float(skipped),
            "gradients_s": gradients_s,
            "step_s": time.perf_counter() - started,
        }

    def save_checkpoint(self, ids_hash: str) -> str:
        """Complete checkpoint of the state after the last step; RunError before the first."""
        if self._version == 0:
            raise RunError("there is no step to checkpoint yet", got=self._version)
        state = checkpoint.TrainerState(
            lineage=self._lineage,
            step=self._version - 1,
            ids_hash=ids_hash,
            seed=self._seed,
            optimiser_steps=self._optimiser_steps,
            params=self.master_parameters(),
            exp_avg=self._moments("exp_avg"),
            exp_avg_sq=self._moments("exp_avg_sq"),
        )
        return str(checkpoint.save(self._checkpoints, state))

    def complete_checkpoints(self) -> tuple[CheckpointMark, ...]:
        """Checkpoints on disk that are whole."""
        return checkpoint.list_complete(self._checkpoints)

    def restore(self, step: int | None, *, lineage: int, load_lineage: int | None = None) -> None:
        """Take the state after `step` and go on in `lineage`; None: stay at version 0, as the model was built.

        `load_lineage` names the checkpoint's lineage where it is another (a fork). WeightsError when the checkpoint does
        not verify or is of another model; RunError for None after a step was made. What crashes left half-written is
        removed.
        """
        for root in (self._checkpoints, self._weights):
            sweep(root)
        if step is None:
            if self._version:
                raise RunError("only a fresh trainer starts from version 0", got=self._version)
            self._lineage = lineage
            return
        state = checkpoint.load(self._checkpoints, lineage=lineage if load_lineage is None else load_lineage, step=step)
        self._check_fits(state.params)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state.params[name])
                self._optimiser.state[master] = {
                    "step": torch.tensor(float(state.optimiser_steps)),
                    "exp_avg": state.exp_avg[name].to(master),
                    "exp_avg_sq": state.exp_avg_sq[name].to(master),
                }
        self._to_model()
        self._version, self._lineage, self._optimiser_steps = step + 1, lineage, state.optimiser_steps

    def publish(self) -> WeightsRef:
        """Write the current weights as a generation in the rollout dtype and return its reference."""
        return self._generations.write(
            self.master_parameters(),
            lineage=self._lineage,
            version=self._version,
            dtype=self._wire_dtype,
        )

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Of `full_weights`, in its order."""
        dtype = str(self._wire_dtype).removeprefix("torch.")
        return tuple(TensorSpec(name=n, shape=tuple(p.shape), dtype=dtype) for n, p in self._masters.items())

    def full_weights(self) -> Generator[tuple[str, Tensor], None, None]:
        """The current weights in the rollout's dtype, one at a time."""
        for name, master in self._masters.items():
            yield name, master.detach().to(self._wire_dtype)

    @property
    def _wire_dtype(self) -> torch.dtype:
        return self._rollout_dtype or next(iter(self._params.values())).dtype

    @property
    def _float_dtype(self) -> torch.dtype:
        return next(iter(self._masters.values())).dtype

    def _accumulate(self, piece: MicroBatch, total: float) -> tuple[float, TokenFigures]:
        """Forward and backward of one micro-batch; its gradient is added to the masters'."""
        # Only the positions that predict a trained token meet the vocabulary.
        logits = self._model.head(self._model.hidden_states(piece.tokens)[piece.rows, piece.columns])
        current, entropy = token_logprobs(logits, piece.targets, temperature=self._temperature)
        proximal = current.detach()
        terms = token_terms(
            current,
            proximal=proximal,
            behaviour=piece.behaviour,
            advantages=piece.advantages,
            objective=self._objective,
        )
        loss = policy_loss(
            terms,
            entropy,
            piece.weights,
            denominator=total,
            entropy_coefficient=self._objective.entropy_coefficient,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._params.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None
        figures = TokenFigures(
            current=proximal,
            entropy=entropy.detach(),
            importance=terms.importance,
            clipped=terms.clipped.detach(),
            behaviour=piece.behaviour,
            ages=piece.ages,
        )
        return float(loss.detach()), figures

    def _update(self, rate: float) -> tuple[float, bool]:
        """Clip and step. Returns the gradient's norm before clipping, and whether the update was left out."""
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), self._algorithm.grad_norm_max))
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            self._optimiser.step()
            self._optimiser_steps += 1
            self._to_model()
        self._optimiser.zero_grad(set_to_none=True)
        return norm, not finite

    @torch.no_grad()
    def _to_model(self) -> None:
        for name, parameter in self._params.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _moments(self, key: str) -> dict[str, Tensor]:
        # AdamW makes its moments at its first step; before that (every update skipped so far) they are zero.
        state = self._optimiser.state
        return {n: state[p][key] if p in state else torch.zeros_like(p) for n, p in self._masters.items()}

    def _check_fits(self, params: Mapping[str, Tensor]) -> None:
        for name in sorted(params.keys() ^ self._masters.keys()):
            raise WeightsError("the checkpoint is of another model", where=str(self._checkpoints), got=name)
        for name, master in self._masters.items():
            got = (tuple(params[name].shape), params[name].dtype)
            if got != (tuple(master.shape), master.dtype):
                expected = str((tuple(master.shape), master.dtype))
                raise WeightsError(f"checkpoint tensor {name} does not fit the model", got=got, expected=expected)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy of a half-precision one."""
    if parameter.dtype in (torch.bfloat16, torch.float16):
        return nn.Parameter(parameter.detach().float())
    return parameter


def _adamw(masters: Mapping[str, nn.Parameter], algorithm: AlgorithmSection) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); weight decay for matrices only, as usual for transformers."""
    matrices = [p for p in masters.values() if p.ndim > 1]
    vectors = [p for p in masters.values() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": algorithm.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=algorithm.learning_rate, betas=algorithm.betas)
