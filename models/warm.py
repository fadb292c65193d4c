"""Warm starts: an existing draft's weights as the first weights of another draft for the same target.

    same family          every tensor is taken, and the draft vocabulary with them: step 0 is the draft that was given
    dflash -> dspark     the backbone is taken; the heads start as the recipe says, so a zero Markov head is DFlash at step 0
    frozen -> trainable  a head that the given draft does not have starts from the target's rows

Nothing is taken in part: a tensor without a place, or of another shape, is refused by its name, and so is a setting that
would give the same numbers another meaning (aux layers, layout, mask token, RoPE, norms).
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.models.draft import Draft

HEADS = ("lm_head.", "draft_vocab", "markov_head.", "confidence_head.")  # what may start fresh
PAIRS = (("dflash", "dspark"),)  # (given, wanted) beyond the same family
# settings that only say how a draft is trained or how far it looks: a start may change them
FREE = frozenset(
    [
        "family",
        "training",
        "ttt_steps",
        "block_len",
        "sliding_window",
        "layer_types",
        "causal",
        "markov_rank",
        "confidence",
        "layer.max_position_embeddings",
        "layer.vocab_size",
    ]
)


@torch.no_grad()
def take(draft: Draft, given: Draft, where: str) -> list[str]:
    """Copy the tensors of `given` into `draft`, which is initialised; returns the tensors that stay as they were.

    where: the folder of `given`, for messages.
    """
    names = given.config.family, draft.config.family
    if names[0] != names[1] and names not in PAIRS:
        raise ValueError(
            f"train.start_from {where}: a {names[0]} draft; a {names[1]} draft starts from {names[1]}"
            + "".join(f" or {first}" for first, second in PAIRS if second == names[1])
        )
    theirs, ours = (_settings(one.neutral()[0]) for one in (given, draft))
    wrong = [key for key in sorted(theirs.keys() & ours.keys()) if theirs[key] != ours[key]]
    if wrong:
        rows = "; ".join(f"{key} {theirs[key]!r} (here {ours[key]!r})" for key in wrong)
        raise ValueError(
            f"train.start_from {where}: its weights were trained with {rows}; give the draft section the same settings"
        )
    source, own = given.state_dict(), draft.state_dict()
    unfit = [
        f"{name} {tuple(tensor.shape)} (here {tuple(own[name].shape) if name in own else 'absent'})"
        for name, tensor in source.items()
        if name not in own or own[name].shape != tensor.shape
    ]
    fresh = sorted(own.keys() - source.keys())
    unfit += [f"{name} {tuple(own[name].shape)} (not in the folder)" for name in fresh if not name.startswith(HEADS)]
    if unfit:
        raise ValueError(
            f"train.start_from {where}: tensors that do not fit: {', '.join(unfit)}; give the draft section the sizes "
            "of that draft"
        )
    for name, tensor in source.items():
        own[name].copy_(tensor)
    return fresh


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that give tensors their meaning, one level deep."""
    flat = {key: value for key, value in config.items() if not isinstance(value, dict)}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
    return {key: value for key, value in flat.items() if key not in FREE and not key.startswith("training.")}
