"""Chains of a recursive draft in training: which rows are supervised, and what they see (training-time test).

A recursive draft (EAGLE-3, MTP) is unrolled in training for S steps over the rows of packed documents. Row t stands for
the features f[t] and anchor t+1. Step s of row t reads token x[t+1+s] at RoPE position t+s and predicts x[t+2+s], whose
teacher is the last hidden state at t+1+s.

    supervised    step s of row t iff the loss mask is 1 at x[t+1] (the anchor), ..., x[t+2+s] (the label), one document
    seen          step-0 keys of rows <= t of the document, and the row's own keys of steps 1..s

Example, T=6, answer x2..x5:   step 0: rows 1, 2, 3      step 1: rows 1, 2      step 2: row 1

The rows of a step are rows of the step before, so each step computes fewer. Everything here is made on the host.
Letters: T tokens, M context rows, N rows of a step, U teacher rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftsmith.models.layers import Span


def supervised_steps(loss_mask: np.ndarray, bounds: Sequence[int], most: int) -> np.ndarray:
    """[T] number of steps, 0..most, at which row t is supervised: at steps 0..n-1 and at no later one."""
    total = len(loss_mask)
    ends = np.asarray(bounds[1:], dtype=np.int64)
    stops = np.union1d(np.flatnonzero(~loss_mask), ends)  # where a run of ones ends
    at = np.arange(1, total + 1)
    ones_ahead = stops[np.minimum(np.searchsorted(stops, at), len(stops) - 1)] - at  # ones from x[t+1] on
    steps = np.clip(ones_ahead - 1, 0, most)
    steps[ends - 1] = 0  # the next token is another document's
    return steps


class Step(NamedTuple):
    """Rows of one step: `rows` [N] among those of step 0, `kept` [N] among those of the step before, the attention
    spans, and `teachers` [N] on the host, the teacher row of each."""

    rows: Tensor
    kept: Tensor
    spans: list[Span]
    teachers: Tensor


class Plan(NamedTuple):
    """Index plan of one pass, made on the host.

    context: [M] packed positions whose features are read: each document from its start to its last row in use.
    prefix: spans of all context rows. rows: [N] context rows of step 0. steps: one entry per step.
    teachers: [U] packed positions whose last hidden state predicts a label.
    """

    context: Tensor
    prefix: list[Span]
    rows: Tensor
    steps: list[Step]
    teachers: Tensor

    @classmethod
    def of(cls, rows: np.ndarray, num_steps: np.ndarray, bounds: Sequence[int], device: torch.device) -> Plan:
        """Plan for ascending packed rows, row i taking part in num_steps[i] >= 1 steps."""
        starts = np.asarray(bounds[:-1], dtype=np.int64)
        doc = np.searchsorted(starts, rows, side="right") - 1
        context, prefix, offsets = [], [], np.zeros(len(starts), dtype=np.int64)
        size = 0
        for d in np.unique(doc):
            stop = int((rows + num_steps)[doc == d].max())  # the last chain reads token x[stop]
            length = stop - int(starts[d])
            offsets[d] = size
            context.append(np.arange(starts[d], stop))
            prefix.append(Span(size, size, size, size + length))
            size += length
        at = rows - starts[doc] + offsets[doc]  # [N] context row of each row
        members = [np.flatnonzero(num_steps > s) for s in range(int(num_steps.max()))]
        teachers = np.unique(np.concatenate([rows[m] + 1 + s for s, m in enumerate(members)]))
        steps = []
        for s, member in enumerate(members):
            before = members[max(s - 1, 0)]
            steps.append(
                Step(
                    torch.from_numpy(member).to(device),
                    torch.from_numpy(np.searchsorted(before, member)).to(device),
                    _spans(at[member], offsets[doc[member]]),
                    torch.from_numpy(np.searchsorted(teachers, rows[member] + 1 + s)),
                )
            )
        return cls(
            torch.from_numpy(np.concatenate(context)).to(device),
            prefix,
            torch.from_numpy(at).to(device),
            steps,
            torch.from_numpy(teachers).to(device),
        )


def _spans(at: np.ndarray, first_keys: np.ndarray) -> list[Span]:
    """Rows that follow each other in one document form one span."""
    cuts = np.flatnonzero((np.diff(at) != 1) | (np.diff(first_keys) != 0)) + 1
    edges = [0, *cuts.tolist(), len(at)]
    return [Span(int(first_keys[a]), int(at[a]), a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def by_documents(doc: np.ndarray, most: int) -> Iterator[slice]:
    """Cut ascending anchors, given their documents, into parts of about `most`; no document is in two parts."""
    begin = 0
    edges = [*(np.flatnonzero(np.diff(doc)) + 1).tolist(), len(doc)]
    for i, edge in enumerate(edges):
        following = edges[i + 1] if i + 1 < len(edges) else None
        if following is None or following - begin > most:
            yield slice(begin, edge)
            begin = edge
