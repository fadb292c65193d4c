"""What the export tests share: tiny targets, writing, reading back, and changing what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import target_model, tokenizer
from torch import Tensor

from draftsmith.models import export
from draftsmith.models.draft import Captured, Draft, TokenStats
from draftsmith.models.sampling import Sampler
from draftsmith.models.target import Target, TargetConfig

LAYOUTS = ("plain", "speculators")
PROMPT = [72, 101, 108, 108, 111]


def target_of(kind: str = "llama", name: str = "org/tiny", **config: Any) -> Target:
    return Target(target_model(kind, **config), tokenizer(), TargetConfig(name=name, dtype="float32"))


def initialised(draft: Draft, target: Target) -> Draft:
    """The draft bound to the target, with random weights."""
    draft.bind(target.embedding, target.head)
    size = target.spec.vocab_size
    pairs = torch.tensor([[a, (3 * a + 1) % size] for a in range(size)])
    stats = TokenStats(torch.arange(size) % 50, pairs, torch.ones(size, dtype=torch.int64))
    draft.initialise(stats, torch.Generator().manual_seed(0))
    return draft


def write(draft: Draft, target: Target, out: Path, layout: str = "plain", dtype: str = "float32", **more: Any) -> Path:
    export.write(draft, target.spec, out, layout, dtype, **more)
    return out


def reload(out: Path, target: Target) -> Draft:
    draft = export.load(out, target.spec, target.embedding)
    draft.bind(target.embedding, target.head)
    return draft.eval()


def proposal(draft: Draft, target: Target, num: int = 3) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) that the draft offers after a short prompt, with a fixed seed."""
    ids = torch.tensor([PROMPT])
    states = target.forward(ids, needs=draft.needs)
    captured = Captured(states.features, states.last_hidden, torch.tensor([len(PROMPT)]))
    sampler = Sampler(temperature=1.0, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        offered = draft.propose(draft.start(1, 32), torch.tensor([[*PROMPT[1:], 33]]), captured, num, sampler)
    return offered.ids, offered.probs


def served_config(out: Path) -> dict[str, Any]:
    """The config as a server sees it: the layers' keys at the top."""
    return export.flatten(json.loads((out / "config.json").read_text()), out)[1]


def edit(out: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Path:
    """Change config and tensors of an export in place."""
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def foreign(out: Path, target: Target, draft: Draft, change: Callable[..., Any], layout: str = "plain") -> Path:
    """An export stripped of our own key, then changed into somebody else's spelling."""
    write(draft, target, out, layout)

    def strip(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config["draftsmith"]
        change(config, tensors)

    return edit(out, strip)
