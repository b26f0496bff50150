"""Scores, selection, and the small kernels of a round: without alternatives, each against its roofline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention import Case, Launch
from rows import Rows, reference_lse
from shapes import LAYERS, MIN_TOKENS, RATIO_PPM, SINK, Shape


def score(rows: Rows, scope: str) -> Launch:
    """`sgl_kernel_ext.score.score_keys` of one layer."""
    from sgl_kernel_ext.score import score_keys

    shape, lse = rows.shape, reference_lse(rows)
    size = (rows.capacity,) if scope == "layer" else (shape.kv_heads, rows.capacity)
    out = torch.zeros(size, dtype=torch.int16, device=rows.q.device)

    def launch(i: int) -> None:
        score_keys(
            rows.q,
            rows.pool.k,
            lse,
            rows.table(i),
            rows.first,
            rows.queries,
            rows.first,
            rows.offset,
            out,
            padded_queries=shape.queries,
            scale=rows.scale,
            scope=scope,
        )

    launch(0)
    # int16 holds the upper half of a float32 without its sign, one bit lower.
    values = (out.int() << 15).view(torch.float32).view(-1, rows.capacity).mean(0)
    total = float(values[: shape.context].sum())
    if not 0.9 < total < 1.01:  # the queries' own keys are not scored, and 16 bits round down
        raise ValueError(f"wrong result: the scores of row 0 sum to {total:.4f} instead of about 1")
    return launch


def select(shape: Shape, device: torch.device, layers: int, dtype: torch.dtype) -> Launch:
    """`sgl_kernel_ext.select.select` of all layers, over log-normal scores.

    int16 keys are what `score_keys` writes, int32 sums what the attention kernel adds up. Clearing these is
    not timed: the next launch would find other keys.
    """
    from sgl_kernel_ext.select import select as run

    line = -(-shape.context // 16) * 16
    generator = torch.Generator(device=device).manual_seed(2)
    values = torch.empty(layers, shape.rows * line, device=device).normal_(generator=generator)
    values = (values * 2 - 8).exp().clamp_(max=1)
    if dtype == torch.int16:
        keys = (values.view(torch.int32) >> 15).to(torch.int16)
    else:
        keys = (values * (1 << 20)).to(torch.int32)
    sets = [keys, keys.flip(1).contiguous(), keys.flip(0).contiguous()]  # more than L2 holds
    ints = {"dtype": torch.int32, "device": device}
    selected = torch.zeros(layers, 1, shape.rows + 1, shape.budget, **ints)
    offset = torch.arange(shape.rows, device=device) * line
    prefix, pools = torch.full((shape.rows,), shape.context, **ints), torch.arange(shape.rows, **ints) + 1

    def launch(i: int) -> None:
        run(
            sets[i % len(sets)],
            offset,
            prefix,
            pools,
            selected,
            ratio_ppm=RATIO_PPM,
            min_tokens=MIN_TOKENS,
            sink=SINK,
            recent=0,
        )

    launch(0)
    _check_selected(sets[0][0, : shape.context], selected[0, 0, 1], exact=dtype == torch.int16)
    return launch


def _check_selected(keys: torch.Tensor, chosen: torch.Tensor, *, exact: bool) -> None:
    """The chosen positions ascend, hold the sinks, and no other key is greater than the least chosen one."""
    inside = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    inside[chosen.long()] = True
    rest = keys[SINK:].float() if exact else keys[SINK:].float().view(torch.int32).bitwise_right_shift(15)
    ascending = bool((chosen.diff() > 0).all()) or len(chosen) < 2
    chosen_rest, others = rest[inside[SINK:]], rest[~inside[SINK:]]
    best = not len(others) or not len(chosen_rest) or bool(others.max() <= chosen_rest.min())
    if not (ascending and best and bool(inside[:SINK].all())):
        raise ValueError("wrong result: row 0 of layer 0 does not hold the greatest keys in ascending order")


class Round:
    """Buffers of one micro-step with `rows` draft and `rows` verify slots, all taken by requests."""

    def __init__(self, shape: Shape, device: torch.device, layers: int) -> None:
        from sgl_kernel_ext import buffers

        rows, q, state_rows = shape.rows, shape.queries, shape.rows + 1
        ints = {"dtype": torch.int32, "device": device}
        longs = {"dtype": torch.int64, "device": device}
        tokens = rows * (1 + q)
        memory = buffers.RoundBuffers(rows, q, device)
        memory.header[1] = 1  # greedy
        table = memory.table
        table[..., 0] = torch.arange(rows, device=device) + 1
        table[:, 1, :, 1] = q - 1
        table[..., 2] = torch.arange(rows, device=device)
        width = shape.context + 2 * q
        self.step = memory.step(rows, rows)
        chosen = torch.linspace(0, shape.context - 1, shape.budget, device=device).int()
        self.state = buffers.RequestTensors(
            committed=torch.full((state_rows,), shape.context, **longs),
            tokens=torch.ones(state_rows, q, **longs),
            selected=chosen.repeat(layers, 1, state_rows, 1).contiguous(),
            selected_len=torch.full((state_rows,), shape.budget, **longs),
            selected_base=torch.full((state_rows,), shape.context, **longs),
            req_to_token=torch.arange(state_rows * width, **ints).view(state_rows, width),
        )
        self.draft_pages = torch.zeros(layers, rows, 1, shape.budget + 2 * q, **ints)
        self.verify_pages = torch.zeros(rows, width, **ints)
        self.picked = torch.full((tokens,), 2, **longs)
        self.out_tokens, self.out_len = torch.zeros(rows, q, **longs), torch.zeros(rows, **longs)

    def launch(self, what: str) -> Launch:
        from sgl_kernel_ext import rounds

        width = self.draft_pages.shape[-1]
        capacity = self.verify_pages.numel()
        launches: dict[str, Callable[[], object]] = {
            "prepare": lambda: rounds.prepare(self.step, self.state, page_width=width, capacity=capacity),
            "draft pages": lambda: rounds.draft_pages(self.step, self.state, self.draft_pages),
            "verify pages": lambda: rounds.verify_pages(self.step, self.state, self.verify_pages),
            "accept (greedy)": lambda: rounds.finish_greedy(
                self.step, self.state, self.picked, self.out_tokens, self.out_len
            ),
        }
        launches["prepare"]()  # fills the lengths that the others read
        return lambda i: launches[what]()


def score_cases(rows: Rows) -> list[Case]:
    """Scores of one layer, for one selection a layer or one a KV head."""
    name, size = rows.shape.name, rows.shape.score_bytes
    per_head = size + 2 * (rows.shape.kv_heads - 1) * rows.shape.rows * rows.shape.context
    return [
        Case("score", name, "ours", size, lambda: score(rows, "layer")),
        Case("score", name, "ours, per KV head", per_head, lambda: score(rows, "kv_head")),
    ]


def select_cases(shape: Shape, device: torch.device, layers: int = LAYERS) -> list[Case]:
    """Selection of all layers in one launch."""
    size = shape.select_bytes * layers // LAYERS
    sums = size + 2 * layers * shape.rows * shape.context  # 4 bytes read instead of 2
    name = f"{shape.name}, {layers} layers"
    return [
        Case("select", name, "ours", size, lambda: select(shape, device, layers, torch.int16)),
        Case("select", name, "ours, int32 sums", sums, lambda: select(shape, device, layers, torch.int32)),
    ]


def round_cases(shape: Shape, device: torch.device, layers: int = LAYERS) -> list[Case]:
    """The small kernels of a micro-step. Bytes are those of the page tables; the rest moves almost none."""
    sizes = {
        "prepare": 0,
        "draft pages": shape.draft_page_bytes * layers // LAYERS,
        "verify pages": shape.verify_page_bytes,
        "accept (greedy)": 0,
    }

    def make(what: str) -> Callable[[], Launch]:
        return lambda: Round(shape, device, layers).launch(what)

    return [Case("round", shape.name, what, size, make(what)) for what, size in sizes.items()]
