"""The training loop: one optimizer step is a sum over documents, however many micro-batches and ranks they fall on.

    counts       c = sum over ranks and micro-batches of draft.counts(batch)           (one all-reduce, before forward)
    loss         L = sum over ranks and micro-batches of draft(batch, c)["loss"].sum
    gradient     dL/dw, reduced over ranks once per step; clipped; moved by the optimizers at lr_factor(step)

DDP, FSDP2 and ZeRO average over ranks and accelerate divides by its accumulation steps; both are undone by `scale`, so
packing, accumulation, ranks and the strategy (strategy.py) change nothing but rounding. Batches are a function of (seed, step), the schedule of the step,
so a resumed run is the uninterrupted run.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, gather_object
from pydantic import Field, model_validator
from torch import Tensor

from draftsmith.models.draft import Batch, Draft, Term
from draftsmith.models.layers import Kernel, attention
from draftsmith.train import checkpoint as folder
from draftsmith.train import gauges
from draftsmith.train.checkpoint import Best, Checkpoint
from draftsmith.train.optim import OptimConfig, Optimizers, lr_factor
from draftsmith.train.preflight import visible_devices_conflict
from draftsmith.train.strategy import Spread, Strategy, asked, check_combination, plain_ranks, spread
from draftsmith.train.track import MetricsFile, Tracker, View, choose, line, start_tracker

COLLECTIVE_TIMEOUT = timedelta(hours=1)  # the other ranks wait this long while rank 0 evaluates
SECOND_SIGNAL_AFTER = 2.0  # seconds; a launcher passes Ctrl-C on to ranks that the terminal has already told
DDP_TYPES = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
ACCEPTANCE = "accept/acceptance_length"


class TrainConfig(OptimConfig):
    """The recipe's `train:` section; optim.py has its first half."""

    batch_tokens: int = Field(2048, ge=1)  # tokens per optimizer step over all ranks; small: many steps beat large ones
    pack_tokens: int = Field(2048, ge=1)  # tokens per micro-batch: what memory allows; changes no result
    seed: int = Field(0, ge=0)  # of initial weights, data order and every random choice
    precision: Literal["fp32", "bf16"] = "fp32"  # of forward and backward; weights and optimizer state stay fp32
    attention: Kernel = "matmul"  # kernel of training: matmul (the reference) or flex (GPUs; falls back when it fails)
    log_every: int = Field(10, ge=1)  # steps per log line; values are means over them
    eval_every: int | None = Field(None, ge=1)  # steps between measurements of acceptance; null = at the end only
    save_every: int | None = Field(100, ge=1)  # steps between checkpoints; null = at evaluations and the end only
    keep_last: int | None = Field(2, ge=1)  # checkpoints kept besides the best one; null = all
    tracker: Tracker = "auto"  # auto = wandb when installed (offline without a key); metrics.jsonl is always written
    on_nonfinite: Literal["stop", "skip"] = (
        "stop"  # NaN or Inf in a step: stop, or leave the step out (syncs each step)
    )
    strategy: Strategy = "auto"  # how ranks share the work; auto = what the launch file asks for, else DDP
    ranks: int | None = Field(None, ge=1)  # ranks this run must have; null = as many as the launcher starts
    extend_from: str | None = None  # run or step folder whose last step this new run goes on from, with more steps
    start_from: str | None = None  # folder of the draft whose weights are the first ones: run, step, draft or export

    @model_validator(mode="after")
    def _one_start(self) -> TrainConfig:
        if self.extend_from is not None and self.start_from is not None:
            raise ValueError(
                f"extend_from {self.extend_from} goes on with a run, start_from {self.start_from} begins one with the "
                "weights of a draft: give one of them"
            )
        return self


class Source(Protocol):
    """Where batches come from (data/batches.py): a function of (seed, step), so it has no position to lose."""

    def step(self, step: int, rank: int, world: int) -> list[Batch]:
        """The micro-batches of `rank` for optimizer step `step` (0-based), as many as every other rank has."""
        ...


class NonFinite(ValueError):
    """A loss or gradient was NaN or Inf."""


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands. interrupted: a signal ended it before the last step; the same command goes on."""

    run: Path
    step: int
    last: Path
    best: Path | None
    acceptance_length: float | None
    interrupted: bool

    @property
    def draft(self) -> Path:
        """The draft to use: the best evaluated one, else the last."""
        return self.best or self.last


def train(
    draft: Draft,
    target: Any,
    source: Source,
    config: TrainConfig,
    run: Path | str,
    *,
    evaluate: Callable[[Draft], Mapping[str, Any]] | None = None,
    recipe: Mapping[str, Any] | None = None,
    data: Mapping[str, str] | None = None,
    accelerator: Accelerator | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    captures: bool = False,
    stderr: bool = False,
) -> TrainResult:
    """Train `draft` in place until config.steps, or go on where `run` stands; every rank calls this alike.

    draft: bound and initialised by the caller, with the same seed on every rank. target: a Target, or None; it is only
    checked to be frozen. evaluate: gives {"acceptance_length": x, "method": ..., other numbers}; rank 0 calls it.
    recipe: resolved sections, compared on resume and kept as recipe.yaml. data: {name: hash}, compared likewise.
    generators: random sequences that the caller's code draws from during training; saved and restored.
    captures: the source runs the target; its time is then logged as capture, not as data.
    stderr: show progress there, because stdout carries JSON.
    Raises ValueError before any work when launch, run folder and config do not fit together, NonFinite while training.
    """
    run = Path(run)
    accelerator = accelerator or make_accelerator(config, run)
    rank, world, main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    device = accelerator.device
    recipe = recipe or {"draft": draft.config.model_dump(mode="json"), "train": config.model_dump(mode="json")}
    settings, generators = dict(recipe.get("eval", {})), generators or {}
    tracker, note = choose(config.tracker)
    check_active(accelerator, config)
    strategy = asked(config.strategy, os.environ)
    check_combination(strategy, config)
    if config.attention == "flex" and device.type != "cuda":
        raise ValueError(f"train.attention flex has no backward on {device.type}: it is for GPUs, set it to matmul")
    check_parameters(draft, target)

    with (
        folder.only_one(run) if main else nullcontext(),
        StopSignals(say=main) as signals,
        released(accelerator) as held,
        attention(config.attention),
    ):
        # -- start, or find where the run stands -------------------------------------------------------------------
        folder.check_unchanged(run, recipe, data or {})
        start = starting_point(run, config, accelerator)
        evaluates = any(gather(accelerator, (evaluate is not None,))[0])  # rank 0 alone may have been given one
        metrics, view = MetricsFile(run), View(start.step if start else 0, config.steps, main, stderr=stderr)
        for text in filter(None, (note, standing(start, config.steps))):
            view.say(text)
        own = start is not None and start.folder.parent == run  # not another run's, of train.extend_from
        measured = agreed(accelerator, start is None or not own or metrics.has(start.step, ACCEPTANCE))
        if start is not None and start.step >= config.steps and (measured or not evaluates):
            folder.restore_weights(start, draft)
            return standing_result(run, start.step, interrupted=False)
        run_id = folder.open_run(run, recipe, data or {}) if main else ""
        accelerator.wait_for_everyone()
        random.seed(config.seed + rank)
        torch.manual_seed(config.seed + rank)
        if start is not None:
            folder.restore_weights(start, draft)  # before they are spread over ranks
        bf16 = config.precision == "bf16"
        on = held(spread(strategy, draft, config, accelerator, bf16=bf16, evaluates=evaluates))
        optimizers = on.optimizers
        use = gauges.Gauges(device)
        flops, said = (gauges.flops_per_token(draft), gauges.device_peak(device)), set[str]()
        window, done = Window(device), 0
        if start is not None:
            saved = folder.restore_state(start, optimizers)
            done = saved["step"]
            if rank < len(saved["random"]):  # a rank that was not there before starts its own sequences
                folder.set_random_state(saved["random"][rank], device, generators)
            if own:
                window = Window(device, saved["window"] if main else {}, saved["window_steps"])
        if main:
            metrics.truncate(done)
        start_tracker(accelerator, tracker, run, run_id, recipe)

        def save() -> None:
            window.pause()
            totals, states = gather(accelerator, (window.totals(), folder.random_state(device, generators)))
            # what a resumed run needs besides weights and optimizer state
            carried = {"window": add_totals(totals), "window_steps": window.num_steps, "random": states}
            ranks = Together(accelerator)
            folder.save(run, done, draft, optimizers, carried, weights=on.weights(), ranks=ranks)
            if main:
                folder.keep_last(run, config.keep_last)
            accelerator.wait_for_everyone()
            window.start()

        def measure() -> None:
            window.pause()
            subject = on.evaluable()
            if main and evaluate is not None:
                found: dict[str, Any] = {}
                with signals.cutting(), undisturbed(subject, device, generators):
                    found = acceptance(evaluate(subject))
                if not signals.cut:
                    view.say(f"step {done}/{config.steps}  acceptance length {found[ACCEPTANCE]:.3f}")
                    accelerator.log(numbers(found), step=done)
                    metrics.append(done, numbers(found))
                    best = Best(done, found[ACCEPTANCE], found.get("accept/method", "runtime"), settings)
                    folder.offer_best(run, best)
                    folder.keep_last(run, config.keep_last)
            accelerator.wait_for_everyone()
            window.start()

        def evaluation_due() -> bool:
            return evaluates and done > 0 and (done == config.steps or divides(config.eval_every, done))

        with view:
            if evaluation_due() and not measured:
                measure()  # a signal or a kill came between saving this step and measuring it
            first_bad = torch.full((), -1, device=device)
            stop = world == 1 and signals.requested
            draft.train()
            window.start()

            while done < config.steps and not stop:
                # -- data, and what the losses are divided by ------------------------------------------------------
                window.clock.start()
                batches = [batch.to(device) for batch in source.step(done, rank, world)]
                assert batches, f"no micro-batch for rank {rank} in step {done}: the source must give an empty one"
                window.clock.lap("capture" if captures else "data")
                denominators, stop_agreed = global_counts(draft, batches, accelerator, signals.requested)
                window.clock.lap("wait")

                # -- gradients, reduced over ranks once, and the update --------------------------------------------
                terms, losses = gradients(on, batches, denominators, window.clock)
                norm = on.clip(config.clip)
                bad = ~(torch.isfinite(norm) & torch.isfinite(torch.stack(losses)).all())
                if config.on_nonfinite == "skip" and bool(accelerator.reduce(bad.float(), "sum")):
                    view.say(f"step {done + 1}/{config.steps}  left out: loss or gradient is not finite")
                else:
                    first_bad = torch.where(bad & (first_bad < 0), done, first_bad)
                    optimizers.set_lr(lr_factor(done, config))
                    optimizers.step()
                    window.add_step(terms, batches)
                optimizers.zero_grad()
                window.clock.lap("optimizer")
                done += 1
                view.advance()

                # -- what is due after this update -----------------------------------------------------------------
                stop = signals.requested if world == 1 else bool(stop_agreed)
                log_due = done == config.steps or done % config.log_every == 0
                save_due = done == config.steps or stop or evaluation_due() or divides(config.save_every, done)
                if log_due or save_due or (world == 1 and device.type == "cpu"):  # elsewhere a look stalls the device
                    check_finite(first_bad, done, batches, losses, source, accelerator, run)
                if log_due:
                    values, slow = window.values(accelerator, use, *flops)
                    values |= rates(optimizers, norm if on.reports_norm else None)
                    window = Window(device)
                    if main:
                        view.say(line(done, config.steps, values))
                        for name in slow.keys() - said:  # once a run
                            view.say(f"warning: {slow[name]}")
                        said |= slow.keys()
                        accelerator.log(numbers(values), step=done)
                        metrics.append(done, values)
                if save_due:
                    save()
                if evaluation_due() and not stop:
                    measure()
                    stop = world == 1 and signals.requested

            names, cuts = gather(accelerator, (signals.name, signals.cut))  # a signal may have reached one rank alone
            result = standing_result(run, done, interrupted=done < config.steps or any(cuts))
            view.say(farewell(result, config.steps, max(names)))
    return result


# -- one step ------------------------------------------------------------------------------------------------------
def global_counts(
    draft: Draft, batches: Sequence[Batch], accelerator: Accelerator, stop: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """(the loss denominators of the whole step, how many ranks want to stop), in one all-reduce.

    A denominator of 0 (nothing supervised anywhere) becomes 1: that step's loss and gradient are 0.
    """
    counts = [draft.counts(batch) for batch in batches]
    names = sorted(counts[0])
    precise = precise_dtype(accelerator.device)
    rows = [torch.stack([c[name].to(precise) for c in counts]).sum() for name in names]
    totals = torch.stack([*rows, torch.tensor(float(stop), dtype=precise, device=accelerator.device)])
    totals = accelerator.reduce(totals, "sum")
    *values, num_stops = totals.unbind()
    return {name: torch.where(v == 0, 1, v).float() for name, v in zip(names, values, strict=True)}, num_stops


def gradients(
    on: Spread, batches: Sequence[Batch], denominators: dict[str, Tensor], clock: gauges.Clock
) -> tuple[list[dict[str, Term]], list[Tensor]]:
    """Add up the gradients of the micro-batches, and over ranks with the last one; returns their terms and losses."""
    all_terms, losses = [], []
    with on.accumulation():
        for i, batch in enumerate(batches):
            with on.micro_batch(last=i + 1 == len(batches)):
                terms = on.model(batch, denominators)
                clock.lap("forward")
                on.backward(terms["loss"].sum * on.scale)
                clock.lap("backward")
            all_terms.append({name: Term(term.sum.detach(), term.count.detach()) for name, term in terms.items()})
            losses.append(terms["loss"].sum.detach())
    on.fill_gradients()
    clock.lap("backward")  # what is reduced after the last micro-batch
    return all_terms, losses


class Window:
    """Terms since the last log line, summed on the device; divided once, after summing over ranks.

    totals, num_steps: what an interrupted run had gathered, so that its next line is that of an uninterrupted run.
    """

    COUNTS = ("supervised_tokens", "idle_batches")  # reported as numbers, not as means

    def __init__(self, device: torch.device, totals: Mapping[str, Sequence[float]] | None = None, num_steps: int = 0):
        self.precise = precise_dtype(device)
        self.sums = {
            name: torch.tensor(pair, dtype=self.precise, device=device) for name, pair in (totals or {}).items()
        }
        self.num_steps = num_steps
        self.timed_steps = self.num_tokens = 0
        self.seconds = 0.0
        self.clock = gauges.Clock(device)
        self.start()

    def start(self) -> None:
        self.began = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock: saving and evaluating are not training time."""
        self.seconds += time.perf_counter() - self.began
        self.start()

    def add_step(self, all_terms: Sequence[dict[str, Term]], batches: Sequence[Batch]) -> None:
        for terms, batch in zip(all_terms, batches, strict=True):
            supervised = batch.loss_mask.sum()
            zero = torch.zeros_like(supervised)
            extra = {"supervised_tokens": Term(supervised, zero), "idle_batches": Term(supervised == 0, zero)}
            for name, (total, count) in (terms | extra).items():
                pair = torch.stack([total.to(self.precise), count.to(self.precise)])
                self.sums[name] = self.sums[name] + pair if name in self.sums else pair
            self.num_tokens += batch.bounds[-1] if batch.bounds else 0
        self.num_steps += 1
        self.timed_steps += 1

    def totals(self) -> dict[str, list[float]]:
        """{name: [sum, count]} of this rank, on the host."""
        return {name: pair.tolist() for name, pair in self.sums.items()}

    def values(
        self, accelerator: Accelerator, use: gauges.Gauges, flops: float, peak: float | None
    ) -> tuple[dict[str, float | None], dict[str, str]]:
        """What is logged, summed over ranks: means of the window (None where nothing was counted), times, use of the
        devices; and what is slow (gauges.warnings). flops: per token; peak: of a device per second, None = unknown."""
        parts = gather(accelerator, (self.totals(), self.num_tokens, self.clock.read(), use.read()))
        totals, num_tokens, clocks, readings = add_totals(parts[0]), sum(parts[1]), parts[2], parts[3]
        self.pause()
        out: dict[str, float | None] = {}
        for name, (total, count) in totals.items():
            if name in self.COUNTS:
                out[f"train/{name}"] = total
            elif name == "loss":  # already divided by the denominators of its step
                out["train/loss"] = total / self.num_steps
            else:
                out[f"train/{name}"] = total / count if count else None
        if not out.get("train/idle_batches"):
            out.pop("train/idle_batches", None)
        steps = max(1, self.timed_steps)
        out |= {"time/tok_s": num_tokens / self.seconds, "time/step_ms": 1000 * self.seconds / steps}
        out |= gauges.split(clocks, steps)
        if peak is not None:
            out["time/mfu"] = num_tokens * flops / self.seconds / (peak * accelerator.num_processes)
        return out | gauges.worst(readings), gauges.warnings(clocks, self.timed_steps, self.seconds)


def add_totals(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The sum over ranks of {name: [sum, count]}; a rank may lack names (nothing supervised there)."""
    out: dict[str, list[float]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = out.get(name, [0.0, 0.0])
            out[name] = [before[0] + total, before[1] + count]
    return out


def rates(optimizers: Optimizers, norm: Tensor | None) -> dict[str, float | None]:
    """The rates of the update just made, per optimizer (overridden groups left out), and its gradient norm."""
    names = {"adamw": "train/lr", "muon": "train/muon_lr"}
    out: dict[str, float | None] = {names[kind]: rate for kind, rate in optimizers.rates().items()}
    return out if norm is None else out | {"train/grad_norm": float(norm)}


def check_finite(
    first_bad: Tensor,
    done: int,
    batches: Sequence[Batch],
    losses: Sequence[Tensor],
    source: Source,
    accelerator: Accelerator,
    run: Path,
) -> None:
    """Stop on every rank if an update since the last look was not finite, naming its step and rows."""
    worst = [step for step in gather(accelerator, (int(first_bad),))[0] if step >= 0]
    if not worst:
        return
    step = min(worst)
    if step == done - 1:  # the step at hand: only the micro-batches whose own loss is bad, if one is
        suspects = [batch for batch, loss in zip(batches, losses, strict=True) if not torch.isfinite(loss)] or batches
    else:
        suspects = source.step(step, accelerator.process_index, accelerator.num_processes)
    per_rank = gather(accelerator, ([row for batch in suspects for row in batch.row_ids],))[0]
    rows = [row for rows in per_rank for row in rows]
    shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    good = folder.latest(run)
    raise NonFinite(
        f"step {step + 1}: the loss or its gradient is NaN or Inf; rows of that step: {shown or '(unnamed)'}. "
        f"Nothing was saved after it; {f'the last good step is {good.folder}' if good else 'no step was saved before'}. "
        "Look at these rows with `draftsmith inspect`, lower train.lr, or leave such steps out: train.on_nonfinite=skip"
    )


# -- start and end -------------------------------------------------------------------------------------------------
def make_accelerator(config: TrainConfig, run: Path | str) -> Accelerator:
    """The Accelerator a run needs; make it before anything else in the process asks accelerate for its state.

    Under torchrun on a machine without an accelerator, accelerate would start unconnected single processes unless it
    is told `cpu=True`.
    """
    check_launch()
    asked(config.strategy, os.environ)  # refuse before ranks are connected
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with plain_ranks():
        accelerator = Accelerator(
            cpu=world > 1 and not torch.accelerator.is_available(),
            mixed_precision="bf16" if config.precision == "bf16" else "no",
            log_with=choose(config.tracker)[0],
            project_dir=str(run),
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False),  # a draft's buffers are constants
                InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT),
            ],
        )
    if world > 1:
        atexit.register(_leave_group)
    return accelerator


def _leave_group() -> None:
    """At the end of the process: a group that outlives the interpreter aborts it (see `released`)."""
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_launch() -> None:
    """Refuse a launch that hides GPUs in two ways at once."""
    conflict = visible_devices_conflict(os.environ, hip=torch.version.hip is not None)
    if conflict is not None:
        raise ValueError(conflict)


def check_active(accelerator: Accelerator, config: TrainConfig) -> None:
    """Compare what accelerate made active with what was asked for; it drops some requests silently."""
    active, kind = accelerator.num_processes, accelerator.distributed_type
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if active != asked:
        raise ValueError(
            f"{asked} ranks were launched, but accelerate connected {active} (distributed_type {kind.value}, device "
            f"{accelerator.device}); pass no accelerator of your own, or make it with draftsmith's make_accelerator"
        )
    if config.ranks is not None and active != config.ranks:
        raise ValueError(
            f"train.ranks is {config.ranks}, but {active} started; on CPUs use `torchrun --nproc_per_node "
            f"{config.ranks} -m draftsmith.train ...` (accelerate launch --cpu starts one process)"
        )
    if kind not in (DistributedType.NO, *DDP_TYPES):
        raise ValueError(
            f"distributed_type {kind.value} is active; accelerate only connects the ranks here: make the accelerator "
            "with draftsmith's make_accelerator"
        )
    wanted = "bf16" if config.precision == "bf16" else "no"
    if accelerator.mixed_precision != wanted:
        raise ValueError(
            f"train.precision {config.precision} needs mixed_precision {wanted!r}, accelerate has "
            f"{accelerator.mixed_precision!r} active"
        )


def check_parameters(draft: Draft, target: Any) -> None:
    """The target is frozen, shares no memory with what is trained, and what is trained is fp32."""
    frozen = dict(target.model.named_parameters()) if target is not None else {}
    trainable = next((name for name, parameter in frozen.items() if parameter.requires_grad), None)
    if trainable is not None:
        raise ValueError(f"target parameter {trainable} requires a gradient; the target is never trained: freeze it")
    owners = {parameter.untyped_storage().data_ptr(): name for name, parameter in frozen.items()}
    for name, parameter in draft.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = owners.get(parameter.untyped_storage().data_ptr())
        if owner is not None:
            raise ValueError(f"draft parameter {name} shares its memory with the target's {owner}: start from a clone")
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"draft parameter {name} is {parameter.dtype}; weights are trained in torch.float32 (small updates are "
                "lost in 16 bits): keep it fp32 and set train.precision=bf16"
            )


def starting_point(run: Path, config: TrainConfig, accelerator: Accelerator) -> Checkpoint | None:
    """The step to go on from: the run's own last one, else that of train.extend_from, else None. All ranks agree."""
    start = folder.latest(run)
    if start is None and config.extend_from is not None:
        start = folder.find(Path(config.extend_from))
        if start.step >= config.steps:
            raise ValueError(
                f"train.extend_from {start.folder} has {start.step} steps, train.steps is {config.steps}: ask for more"
            )
    seen = gather(accelerator, (start.step if start else 0,))[0]
    if len(set(seen)) > 1:
        raise ValueError(f"the ranks see different last steps in {run}: {seen}; put the run folder on a shared disk")
    return start


def standing(start: Checkpoint | None, steps: int) -> str | None:
    if start is None:
        return None
    if start.step >= steps:
        return f"{start.folder}: all {steps} steps are done"
    return f"going on from {start.folder} ({start.step} of {steps} steps are done)"


def standing_result(run: Path, step: int, interrupted: bool) -> TrainResult:
    best = folder.read_best(run)
    best_draft = run / f"step-{best.step}" / "draft" if best else None
    return TrainResult(run, step, run / f"step-{step}" / "draft", best_draft, best.value if best else None, interrupted)


def farewell(result: TrainResult, steps: int, signal_name: str) -> str:
    if result.interrupted:
        return (
            f"{signal_name}: saved {result.last.parent} ({result.step} of {steps} steps). "
            "The same command goes on from there."
        )
    best = f"; best draft {result.best}, acceptance length {result.acceptance_length:.3f}" if result.best else ""
    return f"trained {result.step} steps: {result.last}{best}"


class StopSignals:
    """SIGINT and SIGTERM as a wish to stop: the step is finished and saved. A second one ends the process at once."""

    def __init__(self, say: bool):
        self.say = say
        self.name = ""
        self.cut = False  # an evaluation was broken off
        self._time = 0.0
        self._cutting = False
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._time > SECOND_SIGNAL_AFTER:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.name, self._time = signal.Signals(number).name, time.monotonic()
        if self.say:
            os.write(2, f"\n{self.name}: finishing this step and saving; once more to end at once\n".encode())
        if self._cutting:
            raise _Cut

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Inside, a signal breaks the work off (it is done again after a resume); `cut` says whether it did."""
        self._cutting = True
        try:
            yield
        except _Cut:
            self.cut = True
        finally:
            self._cutting = False


class _Cut(BaseException):
    """Raised by a signal inside StopSignals.cutting; not an Exception, so that no library swallows it."""


class Together:
    """All ranks, as checkpoint.save asks for them."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.rank, self.world = accelerator.process_index, accelerator.num_processes

    def gather(self, value: str | None) -> list[str | None]:
        return gather(self.accelerator, (value,))[0]


@contextmanager
def released(accelerator: Accelerator) -> Iterator[Callable[[Spread], Spread]]:
    """Gives a function that takes hold of the spread draft; afterwards nothing holds it, and trackers are closed.

    A DDP module that lives on keeps gloo's threads alive, which abort the interpreter as it ends (torch 2.13).
    """
    made: list[Spread] = []

    def hold(on: Spread) -> Spread:
        made.append(on)
        return on

    try:
        yield hold
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        for on in made:
            on.close()
        accelerator.free_memory()


# -- small things --------------------------------------------------------------------------------------------------
@contextmanager
def undisturbed(draft: Draft, device: torch.device, generators: Mapping[str, torch.Generator]) -> Iterator[None]:
    """Evaluation mode without gradients, after which every random sequence goes on as if nothing had been drawn."""
    states = folder.random_state(device, generators)
    draft.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        draft.train()
        folder.set_random_state(states, device, generators)


def acceptance(found: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's result as metrics: accept/<name>; it must hold a finite acceptance_length."""
    length = found.get("acceptance_length")
    if not isinstance(length, int | float) or not math.isfinite(length):
        raise ValueError(f"evaluate must return a finite 'acceptance_length', got {length!r} (keys {sorted(found)})")
    return {f"accept/{name}": value for name, value in found.items()}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries a tracker can draw."""
    return {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def gather(accelerator: Accelerator, values: tuple[Any, ...]) -> tuple[list[Any], ...]:
    """For each value the list of it over ranks, in rank order; on one process a list of one."""
    ranks = gather_object([values]) if accelerator.num_processes > 1 else [values]
    return tuple(list(column) for column in zip(*ranks, strict=True))


def agreed(accelerator: Accelerator, value: bool) -> bool:
    """Rank 0's value on every rank: what ranks read from disk by themselves may be of different moments."""
    return gather(accelerator, (value,))[0][0]


def divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def precise_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
