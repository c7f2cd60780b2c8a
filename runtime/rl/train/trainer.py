"""The torch trainer: one AdamW step a batch, on one device or as one rank of a gang."""

import math
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.config.schema import AlgorithmSection, TrainerSection
from runtime.errors import RunError, WeightsError
from runtime.rl.model import Decoder
from runtime.rl.train import checkpoint
from runtime.rl.train.dealing import deal, micro_batch_tokens
from runtime.rl.train.disk_room import FreeBytes, free_bytes
from runtime.rl.train.gang import Gang
from runtime.rl.train.gradients import BatchGradients, GradientComputer
from runtime.rl.train.host_memory import available_bytes
from runtime.rl.train.loss import Objective
from runtime.rl.train.metrics import batch_metrics, token_metrics, token_sums
from runtime.rl.train.saving import Saver, Writes
from runtime.rl.train.schedule import learning_rate
from runtime.rl.train.sharding import first_row, local, shard, whole
from runtime.rl.train.trial import agree_on_compiling
from runtime.rl.types import CheckpointMark, StepMetrics, TrainBatch, WeightsRef
from runtime.rl.weights import GenerationWriter
from runtime.rl.weights.layout import TensorSpec
from runtime.rl.weights.sealed import sweep
from runtime.rl.weights.streamed import write_generation_stream
from runtime.rl.weights.tensor_file import TensorShape


class TorchTrainer:
    """Parameters, AdamW and their place on disk. Implements `runtime.rl.protocols.Trainer`.

    The same batch gives the same update: samples are ordered by themselves, nothing is drawn at random. How the batch is
    cut into micro-batches changes sums in the last bits only. bfloat16 models keep float32 master parameters; gradients
    are summed and moments held in that precision.

    With one optimiser step a batch the current policy *is* the proximal one when the step begins, so proximal logprobs
    are the current ones, detached: no second forward.

    With a `gang` this is one of its ranks: it holds its rows of every parameter and moment, and trains its share of every
    batch. `train_step`, `save_checkpoint`, `begin_checkpoint`, `seal_checkpoint`, `restore`, `publish` and `full_weights` are then
    called by all ranks together (`runtime.rl.train.ranks`); the same batch gives the same update on any number of ranks, to rounding.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        algorithm: AlgorithmSection,
        compute: TrainerSection | None = None,
        temperature: float,
        checkpoints: Path,
        weights: Path,
        rollout_dtype: torch.dtype | None = None,
        full_every: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 0,
        gang: Gang | None = None,
        write: Writes = checkpoint.write,
        host_bytes: Callable[[], int] = available_bytes,
        disk_bytes: FreeBytes = free_bytes,
    ) -> None:
        """`device` is the gang's where there is one. `write`, `host_bytes` and `disk_bytes`: the disk that checkpoints go to, what the
        host's memory has left, and what that disk has (tests give others)."""
        self._gang = gang
        self._device = _numbered(torch.device(device)) if gang is None else gang.device
        self._model_dtype = next(model.parameters()).dtype
        if gang is not None:
            compute = agree_on_compiling(model.config, self._model_dtype, gang, compute)
        self._model = model.to(self._device) if gang is None else shard(model, gang)
        self._algorithm, self._seed = algorithm, seed
        self._checkpoints, self._weights, self._rollout_dtype = checkpoints, weights, rollout_dtype
        self._generations = GenerationWriter(weights, full_every=full_every)
        self._saver = Saver(checkpoints, gang=gang, write=write, host_bytes=host_bytes, disk_bytes=disk_bytes)
        objective = Objective(
            decoupled=algorithm.objective == "decoupled",
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_cap=algorithm.importance_cap,
            entropy_coefficient=algorithm.entropy_coefficient,
        )
        self._params = dict(self._model.named_parameters())
        self._masters = {name: _master(p) for name, p in self._params.items()}
        self._fused = self._device.type == "cuda"
        self._optimiser = _adamw(self._masters, algorithm, fused=self._fused)
        most = algorithm.micro_batch_tokens
        if gang is not None:
            most = micro_batch_tokens(most, gang.shares, gang.rank)
        self._gradients = GradientComputer(
            self._model,
            config=model.config,
            objective=objective,
            temperature=temperature,
            micro_batch_tokens=most,
            masters=self._masters,
            options=compute,
            device=self._device,
            dtype=self._model_dtype,
            may_fall_back=gang is None,
        )
        self._version, self._lineage, self._optimiser_steps = 0, 0, 0

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

    @property
    def facts(self) -> Mapping[str, str]:
        """What was chosen for the device: kernels, compiling, what fits."""
        return self._gradients.facts

    def master_parameters(self) -> Mapping[str, Tensor]:
        """The parameters in master precision, by name. Not copies; with a gang sharded."""
        return {name: p.detach() for name, p in self._masters.items()}

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """One optimiser step on the whole global batch; turns version `batch.step` into `batch.step + 1`.

        A batch without a trained token, or with a gradient that is not finite, advances the version and leaves parameters
        and optimiser as they are (`update_skipped` 1). RunError when the batch is for another version. What kept a checkpoint
        that was begun from the disk is raised here.
        """
        self._saver.check()
        if batch.step != self._version:
            raise RunError("the batch is for another version", got=batch.step, expected=str(self._version))
        started = time.perf_counter()
        total = sum(sum(s.weights) for s in batch.samples)
        done = self._compute(batch, total)
        loss, (sums, largest) = done.loss, token_sums(done.figures)
        if self._gang is not None:
            loss, *sums = self._gang.total((loss, *sums))
            largest = self._gang.most(largest)
        gradients_s = time.perf_counter() - started
        rate = learning_rate(self._algorithm, batch.step)
        grad_norm, skipped = self._update(rate) if done.rows else (0.0, True)
        self._version += 1
        return {
            **batch_metrics(batch),
            **token_metrics(sums, largest),
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "update_skipped": float(skipped),
            "micro_batches": float(done.rows),
            "gradients_s": gradients_s,
            "step_s": time.perf_counter() - started,
        }

    def save_checkpoint(self, ids_hash: str) -> str:
        """Complete checkpoint of the state after the last step; RunError before the first. Each rank writes its rows; rank 0
        seals them, so that only there the checkpoint is complete when this returns."""
        return self._saver.save(self._step_facts(ids_hash), self._state())

    def begin_checkpoint(self, ids_hash: str) -> bool:
        """Copy the state after the last step into host memory, and write it beside the training. False, and nothing was begun,
        where a rank's host has no room for that copy. RunError before the first step and while another is being written."""
        return self._saver.begin(self._step_facts(ids_hash), self._state())

    @property
    def checkpoint_written(self) -> bool:
        """This rank's part of the checkpoint that was begun is written, or failed: `seal_checkpoint` need not wait for it."""
        return self._saver.written

    def seal_checkpoint(self) -> float:
        """Wait for the checkpoint that was begun; it is complete, at rank 0, when this returns. How long it was written, in
        seconds. Raises what kept it from the disk."""
        return self._saver.seal()

    def drop_checkpoint(self) -> None:
        """Nothing remains of a checkpoint that was begun and not sealed. Of a gang rank 0 alone has something to remove."""
        self._saver.drop()

    def complete_checkpoints(self) -> tuple[CheckpointMark, ...]:
        """Checkpoints on disk that are whole."""
        return checkpoint.list_complete(self._checkpoints)

    def restore(self, step: int | None, *, lineage: int, load_lineage: int | None = None) -> None:
        """Take the state after `step` and go on in `lineage`; None: stay at version 0, as the model was built.

        `load_lineage` names the checkpoint's lineage where it is another (a fork). WeightsError when the checkpoint does
        not verify or is of another model; RunError for None after a step was made. What crashes left half-written is
        removed, and so is a checkpoint that was begun.
        """
        self._saver.drop()
        if self._gang is None or self._gang.rank == 0:
            for root in (self._checkpoints, self._weights):
                sweep(root)
        if step is None:
            if self._version:
                raise RunError("only a fresh trainer starts from version 0", got=self._version)
            self._lineage = lineage
            return
        stored = checkpoint.StoredState(
            self._checkpoints, lineage=lineage if load_lineage is None else load_lineage, step=step
        )
        self._check_fits(stored.shapes)
        with torch.no_grad():
            for name, master in self._masters.items():
                moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
                for key, tensor in (("param", master), *moments.items()):
                    self._fill(tensor, stored, f"{key}.{name}")
                # A fused optimiser counts its steps on the device.
                steps = torch.tensor(float(stored.facts.optimiser_steps), device=self._device if self._fused else "cpu")
                self._optimiser.state[master] = {"step": steps, **moments}
        self._to_model()
        self._version, self._lineage = step + 1, lineage
        self._optimiser_steps = stored.facts.optimiser_steps

    def idle(self) -> None:
        """There is no work. What kept a checkpoint that was begun from the disk is raised here too."""
        self._saver.check()

    def publish(self) -> WeightsRef:
        """Write the current weights as a generation in the rollout dtype and return its reference. Of a gang rank 0 writes,
        whole generations only; the others help to gather, and hear of the reference."""
        gang = self._gang
        if gang is None:
            return self._generations.write(
                self.master_parameters(), lineage=self._lineage, version=self._version, dtype=self._wire_dtype
            )
        tensors = self.full_weights()
        if gang.rank != 0:
            for _ in tensors:
                pass
            return WeightsRef(**gang.share(None))
        layout = {n: TensorShape(shape=tuple(p.shape), dtype=self._wire_dtype) for n, p in self._masters.items()}
        ref = write_generation_stream(self._weights, layout, tensors, lineage=self._lineage, version=self._version)
        gang.share({"lineage": ref.lineage, "version": ref.version, "path": ref.path, "digest": ref.digest})
        return ref

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Of `full_weights`, in its order."""
        dtype = str(self._wire_dtype).removeprefix("torch.")
        return tuple(TensorSpec(name=n, shape=tuple(p.shape), dtype=dtype) for n, p in self._masters.items())

    @torch.no_grad()
    def full_weights(self) -> Generator[tuple[str, Tensor], None, None]:
        """Every parameter, whole and in the rollout's dtype, by name, one at a time. All ranks of a gang go through it together,
        to its end."""
        for name, master in self._masters.items():
            yield name, whole(master.detach()).to(self._wire_dtype)

    @property
    def _wire_dtype(self) -> torch.dtype:
        return self._rollout_dtype or self._model_dtype

    def _compute(self, batch: TrainBatch, total: float) -> BatchGradients:
        """Gradients of this rank's samples, in as many rows as every other rank has, the last ones perhaps empty."""
        if self._gang is None:
            return self._gradients.compute(batch.samples, step=batch.step, denominator=total)
        mine = deal(batch.samples, self._gang.shares)[self._gang.rank]
        rounds = int(self._gang.most((len(self._gradients.rows_of(mine)),))[0])
        return self._gradients.compute(mine, step=batch.step, denominator=total, rounds=rounds)

    def _fill(self, tensor: Tensor, stored: checkpoint.StoredState, name: str) -> None:
        """Overwrite what this rank holds of a tensor."""
        if self._gang is None:
            tensor.copy_(stored.whole(name))
            return
        mine = local(tensor)
        mine.copy_(stored.rows(name, first_row(tensor.shape[0], self._gang), mine.shape[0]))

    def _update(self, rate: float) -> tuple[float, bool]:
        """Clip and step. Returns the gradient's norm before clipping, and whether the update was left out."""
        norm = float(whole(nn.utils.clip_grad_norm_(self._masters.values(), self._algorithm.grad_norm_max)))
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

    def _step_facts(self, ids_hash: str) -> checkpoint.StepFacts:
        if self._version == 0:
            raise RunError("there is no step to checkpoint yet", got=self._version)
        return checkpoint.StepFacts(
            lineage=self._lineage,
            step=self._version - 1,
            ids_hash=ids_hash,
            seed=self._seed,
            optimiser_steps=self._optimiser_steps,
        )

    def _state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of parameters and moments, by its names. Not copies; with a gang sharded."""
        return checkpoint.keyed(self.master_parameters(), self._moments("exp_avg"), self._moments("exp_avg_sq"))

    def _moments(self, key: str) -> dict[str, Tensor]:
        # AdamW makes its moments at its first step; before that (every update skipped so far) they are zero.
        state = self._optimiser.state
        return {n: state[p][key] if p in state else torch.zeros_like(p) for n, p in self._masters.items()}

    def _check_fits(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        for name in sorted(shapes.keys() ^ self._masters.keys()):
            raise WeightsError("the checkpoint is of another model", where=str(self._checkpoints), got=name)
        for name, master in self._masters.items():
            fits = (tuple(master.shape), str(master.dtype).removeprefix("torch."))
            if shapes[name] != fits:
                raise WeightsError(
                    f"checkpoint tensor {name} does not fit the model", got=shapes[name], expected=str(fits)
                )


def _numbered(device: torch.device) -> torch.device:
    """The device with its number: "cuda" is the current card. Not all of torch takes it without."""
    index: int | None = device.index
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and index is None else device


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy of a half-precision one."""
    if parameter.dtype in (torch.bfloat16, torch.float16):
        return nn.Parameter(parameter.detach().float())
    return parameter


def _adamw(masters: Mapping[str, nn.Parameter], algorithm: AlgorithmSection, *, fused: bool) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); weight decay for matrices only, as usual for transformers."""
    matrices = [p for p in masters.values() if p.ndim > 1]
    vectors = [p for p in masters.values() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": algorithm.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=algorithm.learning_rate,
        betas=algorithm.betas,
        fused=fused or None,  # None: torch's choice, which tests on a CPU were made with
    )
