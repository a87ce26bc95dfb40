"""One copy of a policy's parameters for several processes, in memory that has no name and so can't be left behind."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from thundersyncrl.errors import WorkerError
from thundersyncrl.learner.policy import Policy

_ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions like."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one parameter lies."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every parameter lies; goes from the process that shares to those that attach."""

    num_bytes: int
    pieces: tuple[Piece, ...]


def make_memory() -> int:
    """Return the descriptor of new, empty memory that children may inherit and map; it goes with its last user."""
    return os.memfd_create("thundersync-weights")


def share(policy: Policy, descriptor: int) -> Layout:
    """Move all parameters into the memory, the frozen ones too, and return where they lie.

    Args:
        policy: on the CPU. Its parameter objects stay the same; their storage changes.
        descriptor: from `make_memory`.
    """
    pieces: list[Piece] = []
    end = 0
    for name, parameter in policy.model.named_parameters():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        pieces.append(Piece(name, start, tuple(parameter.shape), parameter.dtype))
        end = start + parameter.numel() * parameter.element_size()
    layout = Layout(end, tuple(pieces))
    os.ftruncate(descriptor, max(end, 1))
    memory = mmap.mmap(descriptor, max(end, 1))
    parameters = dict(policy.model.named_parameters())
    for piece in layout.pieces:
        place = _tensor(memory, piece)
        place.copy_(parameters[piece.name].detach())
        parameters[piece.name].data = place
    return layout


def attach(policy: Policy, descriptor: int, layout: Layout) -> None:
    """Let a policy of the same model read the shared parameters in place of its own.

    Raises:
        WorkerError: it isn't the same model.
    """
    parameters = dict(policy.model.named_parameters())
    expected = [(piece.name, piece.shape, piece.dtype) for piece in layout.pieces]
    found = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
    if expected != found:
        differ = sorted({str(e) for e in expected} ^ {str(f) for f in found})[:3]
        raise WorkerError(
            f"expected both processes to load the same model, got other parameters: {differ}; did its folder change "
            "while the run started?"
        )
    memory = mmap.mmap(descriptor, max(layout.num_bytes, 1))
    for piece in layout.pieces:
        parameters[piece.name].data = _tensor(memory, piece)


def _tensor(memory: mmap.mmap, piece: Piece) -> Tensor:
    """Return a view; it keeps the mapping alive."""
    count = 1
    for size in piece.shape:
        count *= size
    if count == 0:
        return torch.empty(piece.shape, dtype=piece.dtype)
    return torch.frombuffer(memory, dtype=piece.dtype, count=count, offset=piece.offset).view(piece.shape)
