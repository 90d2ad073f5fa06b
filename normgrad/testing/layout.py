"""Where an element lies as a kernel sees it: its row, its sample, its channel, and its position in the row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """A flattened output as rows, one after the other.

    Attributes
    ----------
    row_length : int
        Elements in a row: what one statistic is taken over, or a vector as a whole.
    channels : int
        How many channels there are, or columns of LayerNorm; 0 where a channel is no more than a single element.
    positions : int
        How many spatial positions (HxW) a channel of a sample has, one after the other.
    row_is : str
        What a row is: a ``row`` of LayerNorm's rows and columns, a ``group`` of a sample in GroupNorm, a ``channel`` of
        a sample in BatchNorm, a ``sample`` of BatchNorm in two dimensions and of GroupNorm's statistics.
    channel_is : str
        What a channel is: a ``group`` in GroupNorm's statistics.
    """

    row_length: int
    channels: int = 0
    positions: int = 1
    row_is: str = "row"
    channel_is: str = "channel"

    @property
    def groups(self) -> int:
        """How many rows a sample has."""
        return self.channels * self.positions // self.row_length

    def row(self, index: np.ndarray) -> np.ndarray:
        """The row that holds the element."""
        return index // self.row_length

    def offset(self, index: np.ndarray) -> np.ndarray:
        """Its offset in the row."""
        return index % self.row_length

    def group(self, index: np.ndarray) -> np.ndarray:
        """Its group, of GroupNorm."""
        return self.row(index) % self.groups

    def sample(self, index: np.ndarray) -> np.ndarray:
        """Its sample."""
        return index // (self.channels * self.positions)

    def channel(self, index: np.ndarray) -> np.ndarray:
        """Its channel."""
        return index // self.positions % self.channels

    def position(self, index: np.ndarray) -> np.ndarray:
        """Its spatial position."""
        return index % self.positions


def layout_of(arguments: Mapping[str, Any], size: int) -> Layout:
    """The layout of an output with so many elements; one that is not as large as the input is a vector."""
    shape = np.shape(arguments["input"])
    if "group" in arguments and "grad_out" not in arguments and size == arguments["N"] * arguments["group"] > 0:
        return Layout(arguments["group"], arguments["group"], 1, "sample", "group")
    if size != math.prod(shape) or "counts" in arguments:
        return Layout(max(size, 1))
    if "normalized_shape" in arguments:
        columns = max(math.prod(arguments["normalized_shape"]), 1)
        return Layout(columns, columns)
    if "group" in arguments:
        channels, positions = arguments["C"], arguments["HxW"]
        return Layout(max(channels // arguments["group"] * positions, 1), channels, positions, "group")
    channels, positions = shape[1], math.prod(shape[2:])
    return (
        Layout(positions, channels, positions, "channel") if positions > 1 else Layout(channels, channels, 1, "sample")
    )
