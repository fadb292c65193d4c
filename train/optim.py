"""Optimisers and schedule: which tensor is moved by AdamW or Muon, and how far at each step.

Muon (torch.optim.Muon, step sizes matched to AdamW's) moves the maps between states; AdamW moves everything else:
norms, biases, and the vocabulary tables that a family names in `Draft.table_params`. The schedule is a pure function of
the step, so there is no scheduler state to lose on resume.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from draftsmith.models.draft import Draft

Piece = dict[str, Any]  # optimizer state of a part of a tensor; see joined
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")  # where torch's AdamW has a fused kernel; on CPU it is 3-10 times faster


class OptimConfig(BaseModel):
    """How weights move; the first half of the recipe's `train:` section."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    steps: int = Field(ge=1)  # optimizer steps of the whole run; the schedule ends here
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices only, AdamW keeps norms and vocabulary tables
    lr: float = Field(1e-4, gt=0)  # AdamW step size at its highest; 1e-4 is what published EAGLE-3 heads use
    muon_lr: float = Field(6e-3, gt=0)  # Muon step size, on AdamW's scale (match_rms_adamw); best of the measured ones
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW moment decays; 0.95 forgets faster, right for short runs
    weight_decay: float = Field(0.0, ge=0)  # per unit of lr, on matrices only; drafts are small and see data few times
    muon_momentum: float = Field(0.95, ge=0, lt=1)  # Muon's moment decay (Jordan 2024)
    muon_ns_steps: int = Field(5, ge=1, le=10)  # Newton-Schulz iterations; 3 make a small step on a CPU a third cheaper
    lr_overrides: dict[str, float] = {}  # {parameter-name prefix: lr at its highest}; the longest prefix wins
    warmup_steps: int | None = Field(None, ge=0)  # steps in which lr grows to its height; null = a tenth, at most 10
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # how lr falls after warm-up
    min_lr_ratio: float = Field(0.0, ge=0, le=1)  # lr at the end / lr at its highest; unused by constant
    clip: float | None = Field(1.0, gt=0)  # largest global gradient norm; null = never clipped

    @model_validator(mode="after")
    def _combinations(self) -> OptimConfig:
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup} must be below steps {self.steps}: lr would never reach its height"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must both be in [0, 1)")
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ValueError(f"min_lr_ratio {self.min_lr_ratio} has no effect with schedule constant: remove it")
        bad = {prefix: lr for prefix, lr in self.lr_overrides.items() if not 0 <= lr < math.inf}
        if bad:
            raise ValueError(f"lr_overrides {bad} must be finite and >= 0")
        return self

    @property
    def warmup(self) -> int:
        """Warm-up steps in use."""
        return min(10, self.steps // 10) if self.warmup_steps is None else self.warmup_steps


def lr_factor(step: int, config: OptimConfig) -> float:
    """What the highest lr is multiplied by at update `step` (0-based), 0..1; depends on nothing else.

    The first warm-up update uses 1 / warmup, so no update is wasted on lr 0; the last update is one short of the
    end of the schedule for the same reason.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
    fall = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall


class Optimizers:
    """AdamW, or Muon and AdamW, driven as one.

    parts: {"adamw": optimizer, "muon": optimizer}. Every group carries `names` (its parameters, in order) and
    `highest_lr`, which the schedule scales. sharded: whether each rank holds a part of the state.
    """

    sharded = False

    def __init__(self, parts: dict[str, torch.optim.Optimizer]):
        self.parts = parts

    def groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts.values():
            yield from part.param_groups

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups() for name in group["names"]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups() for parameter in group["params"]]

    def set_lr(self, factor: float) -> None:
        for group in self.groups():
            group["lr"] = factor * group["highest_lr"]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def rates(self) -> dict[str, float]:
        """The present step size per kind of optimizer, overridden groups left out."""
        return {kind: part.param_groups[0]["lr"] for kind, part in self.parts.items()}

    def state_dict(self) -> dict[str, dict[str, Piece]]:
        """{part: {parameter name: its state}}: moments, momentum, update counts. Rates are not state: they come from
        the recipe and the step."""
        return {
            kind: {
                name: dict(part.state[parameter])
                for group in part.param_groups
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if parameter in part.state
            }
            for kind, part in self.parts.items()
        }

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Sequence[Piece]]]) -> None:
        """saved: the pieces of every tensor's state, however many ranks have written them."""
        self.check_kinds(saved)
        shapes = dict(zip(self.names, (parameter.shape for parameter in self.parameters), strict=True))
        whole = {
            kind: {name: joined(pieces, shapes[name]) for name, pieces in states.items() if name in shapes}
            for kind, states in saved.items()
        }
        self.load_whole(whole)

    def check_kinds(self, saved: Mapping[str, Mapping[str, Any]], kinds: Iterable[str] | None = None) -> None:
        """Refuse state of other optimizers, or of tensors that these do not move."""
        kinds = sorted(self.parts if kinds is None else kinds)
        if sorted(saved) != kinds:
            raise ValueError(
                f"the saved optimizer state is of {sorted(saved)}, this run uses {kinds}: use the same train.optimizer"
            )
        for kind, states in saved.items():
            unknown = sorted(set(states) - set(self.names_of(kind)))
            if unknown:
                raise ValueError(f"the saved {kind} state holds {unknown}, which {kind} does not move in this run")

    def names_of(self, kind: str) -> list[str]:
        """The tensors that one kind of optimizer moves."""
        return [name for group in self.parts[kind].param_groups for name in group["names"]]

    def load_whole(self, saved: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
        """{part: {parameter name: state}}, tensors shaped as the parameters are."""
        for kind, part in self.parts.items():
            names = self.names_of(kind)
            groups = part.state_dict()["param_groups"]  # this run's rates, numbered as torch numbers parameters
            numbers = [number for group in groups for number in group["params"]]
            state = {number: saved[kind][name] for number, name in zip(numbers, names) if name in saved[kind]}
            part.load_state_dict({"state": state, "param_groups": groups})


def joined(pieces: Sequence[Piece], shape: torch.Size) -> dict[str, Any]:
    """The state of a whole tensor from the pieces that ranks have saved.

    A piece holds numbers, and tensors of one axis: a run of the flattened tensor from "start" on, or all of it. A
    tensor that already has the shape is a whole one.
    """
    found = {key: value for key, value in pieces[0].items() if key != "start"}
    for key, value in found.items():
        if not isinstance(value, Tensor):
            continue
        if value.ndim == 0 or (value.shape == shape and "start" not in pieces[0]):
            found[key] = value.clone()  # not the file that it is read from
            continue
        whole, known = value.new_empty(shape.numel()), 0
        for piece in sorted(pieces, key=lambda piece: piece.get("start", 0)):
            start, stop = piece.get("start", 0), piece.get("start", 0) + piece[key].numel()
            if start > known:
                break
            whole[start:stop] = piece[key].flatten()
            known = max(known, stop)
        if known != whole.numel():
            raise ValueError(
                f"saved {key} of a tensor of shape {list(shape)} ends at element {known}: a piece is missing"
            )
        found[key] = whole.view(shape)
    return found


def build(draft: Draft, config: OptimConfig) -> Optimizers:
    """The optimizers of a draft: its trainable tensors and nothing else, AdamW fused where torch can."""
    trainable = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError(f"{type(draft).__name__} has no trainable tensor: nothing to optimise")
    check_overrides(config.lr_overrides, list(trainable))

    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for name, parameter in trainable.items():
        kind = "muon" if config.optimizer == "muon" and is_map(name, parameter, draft.table_params) else "adamw"
        lr = override(name, config.lr_overrides, default=config.muon_lr if kind == "muon" else config.lr)
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0  # norms and biases are scales, not weights
        group = groups.setdefault((kind, lr, decay), {"params": [], "names": [], "highest_lr": lr, "lr": lr})
        group["params"].append(parameter)
        group["names"].append(name)
        group["weight_decay"] = decay

    parts: dict[str, torch.optim.Optimizer] = {}
    adamw = [group for (kind, *_), group in groups.items() if kind == "adamw"]
    muon = [group for (kind, *_), group in groups.items() if kind == "muon"]
    if adamw:
        fused = all(p.device.type in FUSED_DEVICES for group in adamw for p in group["params"])
        parts["adamw"] = torch.optim.AdamW(adamw, lr=config.lr, betas=config.betas, fused=fused)
    if muon:
        parts["muon"] = torch.optim.Muon(
            muon,
            lr=config.muon_lr,
            momentum=config.muon_momentum,
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
    if config.optimizer == "muon" and not muon:
        raise ValueError(f"train.optimizer muon moves no tensor of {type(draft).__name__}: use adamw")
    return Optimizers(parts)


def is_map(name: str, parameter: Tensor, tables: tuple[str, ...]) -> bool:
    """Whether a tensor maps states to states: a matrix that is not one of the family's vocabulary tables."""
    return parameter.ndim == 2 and not name.startswith(tables)


def override(name: str, overrides: dict[str, float], default: float) -> float:
    """The lr of the longest prefix of `name`, else `default`."""
    prefixes = [prefix for prefix in overrides if name.startswith(prefix)]
    return overrides[max(prefixes, key=len)] if prefixes else default


def check_overrides(overrides: dict[str, float], names: list[str]) -> None:
    """Every override must move something; an unused one is refused with the nearest parameter name."""
    for prefix in overrides:
        if not any(name.startswith(prefix) for name in names):
            near = difflib.get_close_matches(prefix, names, n=1, cutoff=0.0)
            raise ValueError(
                f"train.lr_overrides: no trainable tensor starts with {prefix!r}; the nearest is {near[0]!r}"
            )
