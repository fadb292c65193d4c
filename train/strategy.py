"""How one draft is spread over ranks: alone, DDP, FSDP2, DeepSpeed ZeRO-1 or ZeRO-2. The numbers stay those of one rank.

    strategy   weights on a rank   gradients   optimizer state   reduced
    ddp        all                 all         all               once a step (accelerate's DDP)
    fsdp2      1/ranks at rest     1/ranks     1/ranks           once a step (torch's fully_shard)
    zero1      all                 all         1/ranks           once a step (DeepSpeed)
    zero2      all                 1/ranks     1/ranks           once a step (DeepSpeed), held whole until then

ZeRO-3 is refused: a draft is small enough to stand whole on a rank, and gathering its weights again in every round of
an unrolled draft would cost more than it saves; fsdp2 is there for a draft that does not fit.

The launch file (accelerate's) or `train.strategy` asks for a strategy. accelerate itself only connects the ranks: its
FSDP and DeepSpeed plugins are dropped silently on some devices, so both are wrapped here, by the same code on CPUs and
GPUs, and `check` looks at what is active. What is wrapped is a `Step`, the whole of draft and fused head + loss: their
weights are only whole inside its forward. Only the draft's own trainable tensors are in it; the target's frozen
embedding and head are unregistered references, which nothing shards.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from draftsmith.models.draft import Batch, Draft, Term
from draftsmith.train.optim import OptimConfig, Optimizers, Piece, build, joined

Strategy = Literal["auto", "ddp", "fsdp2", "zero1", "zero2"]
PLUGINS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
NOT_OURS = ("ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_TP")
ZERO_3 = (
    "DeepSpeed ZeRO-3 is refused: it shards weights that a draft's size does not ask for and gathers them in every "
    "forward; use zero_stage 1 or 2, or FSDP2 (recipes/launch-rocm-8gpu-fsdp2.yaml)"
)


# -- what is asked for ---------------------------------------------------------------------------------------------
def asked(strategy: Strategy, environment: Mapping[str, str]) -> str:
    """ "single", "ddp", "fsdp2", "zero1" or "zero2": the recipe's wish and the launch file's, which must not differ.

    Raises ValueError for what no run can have here, with the reason.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    launched = _launched(environment)
    if launched is not None and strategy not in ("auto", launched):
        raise ValueError(
            f"train.strategy is {strategy}, but the launch configuration asks for {launched}: leave train.strategy at "
            "auto, or start with another launch file"
        )
    wanted = launched or (strategy if strategy != "auto" else "ddp")
    if world > 1:
        return wanted
    if wanted != "ddp":
        raise ValueError(
            f"{wanted} spreads a run over ranks, but one process started; start several (accelerate launch "
            "--num_processes N, on CPUs torchrun --nproc_per_node N), or set train.strategy=auto"
        )
    return "single"


def _launched(environment: Mapping[str, str]) -> str | None:
    """The strategy that accelerate's launcher has written into the environment; None = plain ranks."""

    def on(name: str) -> bool:
        return environment.get(name, "false").lower() in ("1", "true", "yes")

    for name in NOT_OURS:
        if on(name):
            raise ValueError(
                f"the launch configuration sets {name}; draftsmith trains on one process, with DDP, FSDP2 or DeepSpeed "
                "ZeRO-1/2: use distributed_type MULTI_GPU, FSDP or DEEPSPEED"
            )
    if on("ACCELERATE_USE_FSDP"):
        version = environment.get("FSDP_VERSION", "1")
        if version != "2":
            raise ValueError(f"the launch configuration asks for FSDP version {version}: set fsdp_version: 2")
        for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_OFFLOAD_PARAMS"):
            if on(name):
                raise ValueError(
                    f"{name.lower()}: true has no place here (the target is loaded on every rank, a draft fits on a "
                    "GPU): set it to false"
                )
        return "fsdp2"
    if on("ACCELERATE_USE_DEEPSPEED"):
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
            raise ValueError(
                "the launch configuration names a deepspeed_config_file, which would be ignored: draftsmith writes "
                "DeepSpeed's configuration itself; give deepspeed_config.zero_stage 1 or 2 instead"
            )
        for name in ("OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE"):
            if environment.get(f"ACCELERATE_DEEPSPEED_{name}", "none") != "none":
                raise ValueError(f"{name.lower()} has no effect here: a draft fits on a GPU; set it to none")
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage == "3":
            raise ValueError(ZERO_3)
        if stage not in ("1", "2"):
            raise ValueError(f"zero_stage {stage} is not 1 or 2; without sharding use distributed_type MULTI_GPU")
        return f"zero{stage}"
    return None


def check_combination(strategy: str, config: OptimConfig) -> None:
    """Refuse before any work what a strategy cannot do as one process does it."""
    if strategy.startswith("zero") and config.optimizer == "muon" and config.clip is not None:
        raise ValueError(
            f"train.clip is {config.clip}, but DeepSpeed orthogonalises Muon's matrices before it measures a norm, so "
            "clipping would shrink every Muon step to almost nothing: set train.clip=null, or train with ddp or fsdp2"
        )
    if strategy.startswith("zero") and config.optimizer == "muon" and config.muon_ns_steps != 5:
        raise ValueError(
            f"train.muon_ns_steps is {config.muon_ns_steps}, but DeepSpeed's Muon always makes 5: set it to 5, or train "
            "with ddp or fsdp2"
        )


@contextmanager
def plain_ranks() -> Iterator[None]:
    """Inside, accelerate sees ranks to connect and none of the plugins that this module replaces."""
    hidden = {name: os.environ.pop(name) for name in PLUGINS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


# -- what is wrapped -----------------------------------------------------------------------------------------------
class Step(nn.Module):
    """The forward that is wrapped: the draft in the run's precision, its loss made to depend on every trainable tensor.

    Without that a rank with nothing supervised would give no gradient and let the others wait for ever. zeros: give
    real zeros, for strategies that reduce only the gradients they find; DDP and one process do without.
    """

    def __init__(self, draft: Draft, device: torch.device, bf16: bool, zeros: bool):
        super().__init__()
        self.draft = draft
        self.device_type, self.bf16, self.zeros = device.type, bf16, zeros

    def forward(self, batch: Batch, denominators: dict[str, Tensor]) -> dict[str, Term]:
        with torch.autocast(self.device_type, torch.bfloat16) if self.bf16 else nullcontext():
            terms = self.draft(batch, denominators)
        trainable = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        loss = _Touch.apply(terms["loss"].sum.float(), self.zeros, *trainable)
        return {**terms, "loss": Term(loss, terms["loss"].count)}


class _Touch(torch.autograd.Function):
    """The loss itself, made to depend on every parameter with gradient 0 (None, or real zeros)."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, zeros: bool, *parameters: Tensor) -> Tensor:
        ctx.shapes = [parameter.shape if zeros else None for parameter in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zero = torch.zeros_like(gradient)
        return gradient, None, *[None if shape is None else zero.expand(shape) for shape in ctx.shapes]


# -- the strategies ------------------------------------------------------------------------------------------------
class Spread:
    """One process or DDP, and what the loop asks of every strategy.

    model: what is called with (batch, denominators). optimizers: of this rank. scale: what a loss is multiplied by so
    that the reduced gradient is the sum over ranks and micro-batches.
    """

    reports_norm = True  # whether clip returns the norm of the gradient

    def __init__(self, draft: Draft, config: OptimConfig, accelerator: Accelerator, bf16: bool):
        self.draft, self.accelerator, self.world = draft, accelerator, accelerator.num_processes
        step = Step(draft, accelerator.device, bf16, zeros=False)
        with warnings.catch_warnings():  # accelerate passes DDP a word that torch 2.13 deprecates
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            self.model: Any = accelerator.prepare_model(step)
        self.optimizers = build(draft, config)

    def check(self) -> None:
        """Compare what is active with what was asked for."""
        if isinstance(self.model, DistributedDataParallel) != (self.world > 1):
            raise ValueError(
                f"accelerate prepared a {type(self.model).__name__} for {self.world} ranks; DDP was wanted for several"
            )

    @property
    def scale(self) -> int:
        return self.world * self.accelerator.gradient_accumulation_steps  # DDP's mean and accelerate's division

    def accumulation(self) -> AbstractContextManager[None]:
        """All micro-batches of a step stand inside; afterwards their gradients are reduced."""
        return nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one micro-batch stand inside."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def fill_gradients(self) -> None:
        """A tensor out of use has gradient 0, on one rank as on several."""
        for parameter in self.optimizers.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def clip(self, limit: float | None) -> Tensor:
        """The global norm of the reduced gradient before it is cut to `limit`; not finite where it is not."""
        return self.accelerator.clip_grad_norm_(self.optimizers.parameters, limit or math.inf)

    def weights(self) -> dict[str, Tensor] | None:
        """The whole state dict of a draft that does not stand whole on this rank, else None. Every rank calls it."""
        return None

    def evaluable(self) -> Draft:
        """A whole draft with the present weights, on rank 0. Every rank calls it."""
        return self.draft

    def close(self) -> None:
        """Let go of what would outlive the run."""


class FullyShardedSpread(Spread):
    """FSDP2: the draft in one group, gathered in fp32 once a step, its gradients scattered once a step in fp32.

    One group and not one per layer, because families read weights of their layers without calling the layers, and an
    unrolled draft (EAGLE-3) would gather its layer again in every round. Matrix products run in train.precision by
    autocast, as with every other strategy, so norms keep fp32 weights.
    """

    def __init__(
        self, draft: Draft, config: OptimConfig, accelerator: Accelerator, bf16: bool, evaluates: bool = False
    ):
        self.draft, self.accelerator, self.world = draft, accelerator, accelerator.num_processes
        draft.to(accelerator.device)
        for tensor in draft.state_dict().values():
            torch.distributed.broadcast(tensor, 0)  # as DDP does: rank 0's weights are everyone's
        self.whole = self._copy() if evaluates and accelerator.is_main_process else None
        step = Step(draft, accelerator.device, bf16, zeros=True)
        mesh = init_device_mesh(accelerator.device.type, (self.world,))
        self.model = fully_shard(step, mesh=mesh, reshard_after_forward=False)
        self.optimizers = ShardedOptimizers(build(draft, config).parts)

    def check(self) -> None:
        assert isinstance(self.model, FSDPModule)
        for name, parameter in self.draft.named_parameters():
            if not isinstance(parameter, DTensor) or parameter.device_mesh.size() != self.world:
                raise ValueError(
                    f"fsdp2 was asked for, but draft parameter {name} is not sharded over {self.world} ranks"
                )

    @property
    def scale(self) -> int:
        return self.world  # FSDP2's mean

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, limit: float | None) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.optimizers.parameters, limit or math.inf)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights(self) -> dict[str, Tensor]:
        main, found = self.accelerator.is_main_process, {}
        for name, tensor in self.draft.state_dict().items():
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if main:
                found[name] = tensor.cpu()
        return found

    def evaluable(self) -> Draft:
        weights = self.weights()
        if self.whole is None:
            return self.draft
        self.whole.load_state_dict(weights)
        return self.whole

    def _copy(self) -> Draft:
        """A second draft that shares the target's frozen tensors."""
        frozen = [self.draft.embedding, self.draft.target_head, self.draft.target_norm]
        return copy.deepcopy(self.draft, {id(t): t for t in frozen if t is not None})


class ShardedOptimizers(Optimizers):
    """Optimizers of tensors that are sharded along their first axis. Muon sees whole matrices: each gradient is
    gathered once, and its momentum (Muon's only state) is kept whole."""

    sharded = True

    def step(self) -> None:
        if "muon" in self.parts:
            for group in self.parts["muon"].param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
        super().step()

    def state_dict(self) -> dict[str, dict[str, Piece]]:
        """This rank's piece of every tensor's state; of momentum that is kept whole, rank 0's."""
        return {
            kind: {name: piece for name, state in states.items() if (piece := self._piece(state)) is not None}
            for kind, states in super().state_dict().items()
        }

    def _piece(self, state: dict[str, Any]) -> Piece | None:
        piece: Piece = {}
        for key, value in state.items():
            if not isinstance(value, DTensor) or value.ndim == 0:
                piece[key] = value.full_tensor() if isinstance(value, DTensor) else value
                continue
            mesh, local = value.device_mesh, value.to_local()
            if value.placements[0].is_replicate():
                if mesh.get_local_rank() > 0:
                    return None
            else:
                piece["start"] = min(_rows(value)[0], value.shape[0]) * (value.numel() // value.shape[0])
            piece[key] = local.flatten().clone()
        return piece

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Sequence[Piece]]]) -> None:
        owners = {name: p for group in self.groups() for name, p in zip(group["names"], group["params"], strict=True)}

        def mine(kind: str, name: str, pieces: Sequence[Piece]) -> dict[str, Any]:
            parameter = owners[name]
            state = joined(pieces, parameter.shape)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = _like(parameter, value, whole=kind == "muon")
            return state

        self.check_kinds(saved)
        self.load_whole({k: {n: mine(k, n, pieces) for n, pieces in states.items()} for k, states in saved.items()})


def _rows(tensor: DTensor) -> tuple[int, int]:
    """First row and past-the-last row of this rank's shard: torch.chunk's rule."""
    rows, rank = -(-tensor.shape[0] // tensor.device_mesh.size()), tensor.device_mesh.get_local_rank()
    return rank * rows, min((rank + 1) * rows, tensor.shape[0])


def _like(parameter: DTensor, value: Tensor, whole: bool) -> DTensor:
    """A plain tensor as optimizer state of a sharded parameter."""
    start, stop = _rows(parameter)
    local = (value if whole else value[start:stop]).to(parameter.device).clone()
    placements = [Replicate()] if whole else parameter.placements
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


class ZeroSpread(Spread):
    """DeepSpeed ZeRO-1 or ZeRO-2 on fp32 weights, driven directly: accelerate's backward would also make the update."""

    def __init__(self, draft: Draft, config: OptimConfig, accelerator: Accelerator, bf16: bool, stage: int):
        try:
            import deepspeed
        except ImportError as error:
            raise ValueError(
                f"strategy zero{stage} needs the package deepspeed ({error}): pip install 'draftsmith[deepspeed]' "
                "(with --no-deps beside a ROCm torch), or use ddp or fsdp2"
            ) from error
        self.draft, self.accelerator, self.world = draft, accelerator, accelerator.num_processes
        self.stage = stage
        self.reports_norm = config.optimizer == "adamw"
        parts = build(draft.to(accelerator.device), config)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # the loop says itself which micro-batch is the last
            "gradient_clipping": config.clip or 0.0,
            "zero_optimization": {"stage": stage, "overlap_comm": accelerator.device.type != "cpu"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        names = {parameter: name for name, parameter in draft.named_parameters()}
        step = Step(draft, accelerator.device, bf16, zeros=True)
        self.model, *_ = deepspeed.initialize(
            model=step, optimizer=_for_zero(parts, config), config=settings, dist_init_required=False
        )
        if not hasattr(self.model, "coalesce_grad_reduction"):
            raise ValueError(f"deepspeed {deepspeed.__version__} is too old: pip install -U 'deepspeed>=0.19'")
        self.model.set_gradient_accumulation_boundary(True)  # the loop calls step once per optimizer step
        self.optimizers = ZeroOptimizers(self.model, names)

    def check(self) -> None:
        stage, ranks = self.model.zero_optimization_stage(), self.model.dp_world_size
        if (stage, ranks) != (self.stage, self.world) or not self.model.zero_optimization():
            raise ValueError(
                f"ZeRO-{self.stage} on {self.world} ranks was asked for, DeepSpeed made stage {stage} on {ranks} active"
            )
        trained = {id(p) for group in self.model.optimizer.bit16_groups for p in group}
        missing = [n for n, p in self.draft.named_parameters() if p.requires_grad and id(p) not in trained]
        if missing:
            raise ValueError(f"ZeRO-{self.stage} moves no {', '.join(missing)}")

    @property
    def scale(self) -> int:
        return self.world  # ZeRO's mean

    def accumulation(self) -> AbstractContextManager[None]:
        """ZeRO-2 by itself reduces gradients in the order in which they appear, and that order differs on a rank with
        nothing supervised: the sums would mix tensors without a word. Here they are reduced at the end, in one order.
        """
        return self.model.coalesce_grad_reduction()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def fill_gradients(self) -> None:
        """Step has given every tensor a gradient."""

    def clip(self, limit: float | None) -> Tensor:
        norm = torch.as_tensor(self.model.optimizer.scaled_global_norm())  # cut by DeepSpeed in its step
        return torch.where(norm < 0, torch.inf, norm)  # -1 stands for a norm that is not finite

    def close(self) -> None:
        self.model.destroy()


def _for_zero(parts: Optimizers, config: OptimConfig) -> torch.optim.Optimizer:
    """One optimizer, as ZeRO takes only one: torch's AdamW, or DeepSpeed's own Muon with AdamW beside it.

    DeepSpeed scales an orthogonalised step by sqrt(max(1, rows / columns)), torch (match_rms_adamw) by
    0.2 sqrt(max(rows, columns)); the quotient goes into the step size, one group per shape.
    """
    if "muon" not in parts.parts:
        return parts.parts["adamw"]
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    groups: list[dict[str, Any]] = []
    for group in parts.parts["muon"].param_groups:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parameter.use_muon = True  # what ZeRO looks at; without it a matrix would be moved by its plain gradient
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for (rows, columns), parameters in by_shape.items():
            ratio = 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))
            groups.append(
                {
                    "params": parameters,
                    "use_muon": True,
                    "lr": group["highest_lr"] * ratio,
                    "highest_lr": group["highest_lr"] * ratio,
                    "shown_lr": 1 / ratio,
                    "momentum": config.muon_momentum,
                    "weight_decay": group["weight_decay"] / ratio,
                    "ns_method": "standard",
                }
            )
    for group in parts.parts["adamw"].param_groups if "adamw" in parts.parts else []:
        keys = ("params", "lr", "highest_lr", "betas", "eps", "weight_decay")
        groups.append({"use_muon": False, **{key: group[key] for key in keys}})
    return MuonWithAuxAdam(groups)


class ZeroOptimizers(Optimizers):
    """DeepSpeed's optimizer, whose groups are flat tensors of which each rank moves its part."""

    sharded = True

    def __init__(self, engine: Any, names: Mapping[nn.Parameter, str]):
        super().__init__({"zero": engine.optimizer.optimizer})
        self.engine, self.zero = engine, engine.optimizer
        self.own_names = [[names[p] for p in group] for group in self.zero.bit16_groups]

    @property
    def names(self) -> list[str]:
        return [name for group in self.own_names for name in group]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.zero.bit16_groups for parameter in group]

    def names_of(self, kind: str) -> list[str]:
        of_kind = [("muon" if group.get("use_muon") else "adamw") == kind for group in self.groups()]
        return [name for yes, group in zip(of_kind, self.own_names, strict=True) if yes for name in group]

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """Forget the gradients, also those of a step that is left out."""
        self.zero.zero_grad(set_to_none=True)
        for kept in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
            for index in kept:
                kept[index] = None

    def rates(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for group in self.groups():
            kind = "muon" if group.get("use_muon") else "adamw"
            found.setdefault(kind, group["lr"] * group.get("shown_lr", 1.0))
        return found

    def _groups(self) -> Iterator[tuple[str, list[tuple[str, Any]], Tensor, dict[str, Any]]]:
        """(kind, its named tensors, this rank's flat part, the state of that part) of every group."""
        for i, group in enumerate(self.parts["zero"].param_groups):
            [flat] = group["params"]
            named = list(zip(self.own_names[i], self.zero.bit16_groups[i], strict=True))
            kind = "adamw"
            if group.get("use_muon"):
                kind, here = "muon", {id(p) for p in self.zero.params_in_partition[i]}
                named = [(name, p) for name, p in named if id(p) in here]
            yield kind, named, flat, self.parts["zero"].state[flat]

    def state_dict(self) -> dict[str, dict[str, Piece]]:
        """This rank's pieces: of AdamW the part of each tensor that it moves, of Muon the whole momentum of the
        matrices that it orthogonalises."""
        found: dict[str, dict[str, Piece]] = {}
        for kind, named, _, state in self._groups():
            pieces, at = found.setdefault(kind, {}), 0
            for name, parameter in named if state else []:
                if kind == "muon":
                    pieces[name] = {"momentum_buffer": state["momentum_buffer"][at : at + parameter.numel()].clone()}
                    at += parameter.numel()
                elif (place := parameter._hp_mapping) is not None:
                    inside = slice(place.hp_fragment_address.start, None)
                    numel = place.hp_fragment_address.numel
                    pieces[name] = {
                        "start": place.lp_fragment_address.start,
                        "step": torch.tensor(float(state["step"])),
                        **{key: state[key][inside][:numel].clone() for key in ("exp_avg", "exp_avg_sq")},
                    }
        return found

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Sequence[Piece]]]) -> None:
        self.check_kinds(saved, {kind for kind, *_ in self._groups()})
        for kind, named, flat, state in self._groups():
            known = [(parameter, joined(saved[kind][name], parameter.shape)) for name, parameter in named]
            if kind == "muon":
                if known:
                    whole = torch.cat([old["momentum_buffer"].flatten() for _, old in known])
                    state["momentum_buffer"] = whole.to(flat.device)
                continue
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(flat)
            state["step"] = torch.zeros(()) if type(self.parts["zero"]) is torch.optim.AdamW else 0
            for parameter, old in known:
                state["step"] = old["step"].clone() if isinstance(state["step"], Tensor) else int(old["step"])
                if (place := parameter._hp_mapping) is None:
                    continue
                numel = place.hp_fragment_address.numel
                for key in ("exp_avg", "exp_avg_sq"):
                    piece = old[key].flatten()[place.lp_fragment_address.start :][:numel]
                    state[key][place.hp_fragment_address.start :][:numel] = piece.to(flat.device)


def spread(
    strategy: str, draft: Draft, config: OptimConfig, accelerator: Accelerator, *, bf16: bool, evaluates: bool
) -> Spread:
    """The draft under a strategy, checked to be active."""
    made: Spread
    if strategy == "fsdp2":
        made = FullyShardedSpread(draft, config, accelerator, bf16, evaluates)
    elif strategy.startswith("zero"):
        made = ZeroSpread(draft, config, accelerator, bf16, int(strategy[-1]))
    else:
        made = Spread(draft, config, accelerator, bf16)
    made.check()
    return made
