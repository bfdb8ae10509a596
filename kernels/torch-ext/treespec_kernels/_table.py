"""Which tile of the attention kernel runs a shape: a table, so that a call never measures anything.

The rows come from compiled resources (no spills, shared memory within every target's limit); a bench on a device may
refresh them. A key of the table is (family of devices, head dimension that is compiled).
"""

import os
from dataclasses import dataclass

__all__ = [
    "FAMILIES",
    "HEAD_DIMS",
    "HEAVY_TABLE",
    "MAX_SPLITS",
    "TABLE",
    "WIDE_TABLE",
    "Tile",
    "choose_splits",
    "choose_tile",
]

MAX_SPLITS = 64
OVERRIDE = "TREESPEC_ATTENTION_TILE"


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled shape of the kernel.

    Args:
        block_m: rows of a program, a row being one (node, query head of the group).
        block_n: keys of a step.
        warps: warps of a program.
        stages: steps whose loads are in flight at once.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


FAMILIES = ("sm80", "sm90", "sm100", "sm120", "gfx9")
HEAD_DIMS = (16, 32, 64, 128, 256, 512)

# Each row: the most rows (nodes times heads of a group) that the tile serves; None for any number. Only the targets
# with wgmma or tcgen05 have registers left for 128 rows.
_Rows = tuple[tuple[int | None, Tile], ...]
_SMALL: _Rows = ((16, Tile(16, 64, 4, 2)), (32, Tile(32, 64, 4, 2)))
_SHALLOW: _Rows = (*_SMALL, (None, Tile(64, 32, 8, 2)))
_NARROW: _Rows = (*_SMALL, (None, Tile(64, 64, 8, 2)))
_BROAD: _Rows = (*_SMALL, (128, Tile(64, 64, 8, 2)), (None, Tile(128, 64, 8, 2)))
_DEEP: _Rows = ((16, Tile(16, 32, 4, 2)), (32, Tile(32, 32, 4, 2)), (None, Tile(64, 32, 8, 2)))
_DEEPEST: _Rows = ((16, Tile(16, 16, 8, 1)), (None, Tile(32, 16, 8, 1)))
_AMD: _Rows = ((16, Tile(16, 32, 4, 2)), (32, Tile(32, 32, 4, 2)), (None, Tile(64, 32, 8, 2)))

TABLE: dict[tuple[str, int], _Rows] = {
    **{(family, head_dim): _SHALLOW for family in ("sm80", "sm90", "sm100", "sm120") for head_dim in (16, 32)},
    **{(family, head_dim): _NARROW for family in ("sm80", "sm120") for head_dim in (64, 128)},
    **{(family, head_dim): _BROAD for family in ("sm90", "sm100") for head_dim in (64, 128)},
    **{(family, 256): _DEEP for family in ("sm80", "sm90", "sm100", "sm120")},
    **{(family, 512): _DEEPEST for family in ("sm80", "sm90", "sm100", "sm120", "gfx9")},
    **{("gfx9", head_dim): _AMD for head_dim in (16, 32, 64, 128, 256)},
}

# Windows and soft caps take registers, on every family alike: by head dimension.
_HEAVY_SMALL: _Rows = ((16, Tile(16, 32, 4, 2)), (32, Tile(32, 32, 4, 2)))
HEAVY_TABLE: dict[int, _Rows] = {
    **dict.fromkeys((16, 32, 64), (*_HEAVY_SMALL, (None, Tile(64, 32, 4, 2)))),
    128: (*_HEAVY_SMALL, (None, Tile(64, 32, 8, 2))),
    256: ((16, Tile(16, 32, 8, 2)), (None, Tile(32, 32, 8, 2))),
    512: ((None, Tile(16, 32, 8, 1)),),
}

# float32 multiplies without matrix units and holds twice the bytes: by head dimension, for every family.
WIDE_TABLE: dict[int, Tile] = {
    **dict.fromkeys((16, 32, 64), Tile(32, 32, 4, 1)),
    128: Tile(16, 16, 4, 1),
    256: Tile(16, 32, 8, 1),
    512: Tile(16, 16, 8, 1),
}


def choose_tile(rows: int, head_dim: int, family: str, *, wide: bool, heavy: bool) -> Tile:
    """The tile for a call; the environment variable `TREESPEC_ATTENTION_TILE` ("64,64,8,2") overrides it.

    Args:
        rows: nodes times query heads of a key head.
        head_dim: compiled head dimension, one of `HEAD_DIMS`.
        family: one of `FAMILIES`.
        wide: whether the queries are float32.
        heavy: whether there is a window or a soft cap.

    Raises:
        ValueError: the override is not four integers.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        numbers = override.split(",")
        if len(numbers) != 4 or not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(
                f"{OVERRIDE} is {override!r}; expected four integers, as in '64,64,8,2' (rows, keys, warps, stages); "
                "correct or unset it."
            )
        return Tile(*(int(number) for number in numbers))
    if wide:
        return WIDE_TABLE[head_dim]
    table = HEAVY_TABLE[head_dim] if heavy else TABLE[family, head_dim]
    return next(tile for most, tile in table if most is None or rows <= most)


def choose_splits(*, programs: int, max_len: int, block_m: int, processors: int) -> int:
    """Into how many parts the keys are split so that the device is full, a power of two.

    Args:
        programs: programs of one part.
        max_len: bound on the number of keys.
        block_m: rows of a program; more rows make a merge dearer, hence longer parts.
        processors: multiprocessors of the device.
    """
    most = min(2 * processors // max(programs, 1), max_len // max(256, 4 * block_m), MAX_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)
