"""The layout of masks, and the rows that don't come from a backend. Knows numpy, nothing else."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int32]
"""One mask: int32[words]."""


def words_for(width: int) -> int:
    """Words of a mask for a vocabulary of `width` tokens."""
    return (width + 31) // 32


def row_of(token_ids: Iterable[int], width: int) -> Row:
    """The mask that allows just these tokens, each below `width`."""
    bits = np.zeros(words_for(width) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def tail_word(width: int) -> np.int32:
    """What the last word of a row may have set: the bits below `width`."""
    used = width % 32
    return np.int32(-1) if used == 0 else np.int32((1 << used) - 1)
