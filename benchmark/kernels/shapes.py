"""Shapes that the kernels are timed at, and the bytes that they must move. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

LAYERS = 36  # of the model that select, prepare and page tables are timed for
RATIO_PPM, MIN_TOKENS, SINK = 50_000, 256, 4


@dataclass(frozen=True)
class Shape:
    """Rows of `context` committed tokens with `queries` query tokens each; sizes of one layer.

    Query token t of a row stands at position `context + t`, so the last one sees `context + queries` keys.
    """

    rows: int
    context: int
    queries: int = 9
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    itemsize: int = 2

    @property
    def name(self) -> str:
        size = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{self.rows}x{size}"

    @property
    def keys(self) -> int:
        """Keys of one row."""
        return self.context + self.queries

    @property
    def slots(self) -> int:
        """KV slots of all rows."""
        return self.rows * self.keys

    @property
    def key_bytes(self) -> int:
        """Bytes of K alone (as many again are V's)."""
        return self.slots * self.kv_heads * self.dim * self.itemsize

    @property
    def attention_bytes(self) -> int:
        """K and V, each read once."""
        return 2 * self.key_bytes

    @property
    def score_bytes(self) -> int:
        """K read once and one 16-bit score written for each committed key."""
        return self.key_bytes + 2 * self.rows * self.context

    @property
    def budget(self) -> int:
        """Keys that `select` chooses in a row."""
        return min(self.context, max(MIN_TOKENS, -(-self.context * RATIO_PPM // 1_000_000)) + SINK)

    @property
    def select_bytes(self) -> int:
        """All layers: 16-bit scores read once, 32-bit positions written."""
        return LAYERS * self.rows * (2 * self.context + 4 * self.budget)

    @property
    def draft_page_bytes(self) -> int:
        """All layers: positions read, their slots read and written, 32 bits each."""
        return LAYERS * self.rows * 3 * 4 * self.budget

    @property
    def verify_page_bytes(self) -> int:
        """Slots of all rows read and written, 32 bits each."""
        return 2 * 4 * self.slots


VERIFY = [Shape(48, 8192), Shape(24, 16384), Shape(48, 16384), Shape(5, 8192)]
# A draft row of n keys: its own token is the last of them.
DRAFT = [Shape(43, 409, queries=1), Shape(48, 819, queries=1), Shape(114, 409, queries=1)]
SMOKE_VERIFY = [Shape(2, 96, queries=3, heads=4, kv_heads=2, dim=64)]
SMOKE_DRAFT = [Shape(3, 40, queries=1, heads=4, kv_heads=2, dim=64)]


def draft_name(shape: Shape) -> str:
    """Draft rows are named by the keys they attend to."""
    return f"{shape.rows}x{shape.keys}"


def score_shift(shape: Shape) -> int:
    """Largest shift at which the scores of one key, each at most 1, cannot overflow an int32 sum."""
    return 30 - (shape.queries * shape.heads).bit_length()
