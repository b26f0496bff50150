"""Table and plot of a kernel benchmark's report.

python benchmark/kernels/kernel_report.py kernels.json --png kernels.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ["kernel", "shape", "alternative", "us", "roofline us", "TB/s", "of read"]


def line_of(entry: dict[str, Any]) -> str:
    """One line for the console."""
    line = f"{entry['group']:16} {entry['shape']:18} {entry['kernel']:26}"
    if entry["status"] != "ok":
        return f"{line} {entry['status']}: {entry['reason']}"
    line += f" {entry['us']:9.1f} us"
    if entry["bytes"]:
        line += f"  {entry['tb_per_s']:6.2f} TB/s  {entry['percent_of_read']:5.1f}% of read bandwidth"
    return line


def rows_of(report: dict[str, Any]) -> list[list[str]]:
    """Cells of the table; what was not measured shows why in the place of its time."""
    rows = []
    for entry in report["results"]:
        row = [entry["group"], entry["shape"], entry["kernel"]]
        if entry["status"] != "ok":
            row += [entry["status"], "", "", ""]
        elif not entry["bytes"]:
            row += [f"{entry['us']:.1f}", "", "", ""]
        else:
            row += [f"{entry['us']:.1f}", f"{entry['roofline_us']:.1f}", f"{entry['tb_per_s']:.2f}",
                    f"{entry['percent_of_read']:.0f}%"]  # fmt: skip
        rows.append(row)
    return rows


def text_table(report: dict[str, Any], *, markdown: bool = False) -> str:
    """The table with aligned columns, as text or as markdown."""
    lines = [COLUMNS, *rows_of(report)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [text.ljust(width) if at < 3 else text.rjust(width)
         for at, (text, width) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]  # fmt: skip
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in padded)
    rule = "|".join(
        "-" * (width + 2) if at < 3 else "-" * (width + 1) + ":" for at, width in enumerate(widths)
    )
    body = ["| " + " | ".join(line) + " |" for line in padded]
    return "\n".join([body[0], f"|{rule}|", *body[1:]])


def panels(report: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Measured entries by (group, shape), in the report's order."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in report["results"]:
        if entry["status"] == "ok":
            found.setdefault((entry["group"], entry["shape"]), []).append(entry)
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of microseconds with rooflines as lines, one panel a shape. SystemExit without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--png needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = panels(report)
    if not found:
        raise SystemExit("nothing was measured, so there is nothing to draw.")
    across = min(4, len(found))
    down = math.ceil(len(found) / across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(4 * across, 3.4 * down), squeeze=False, layout="constrained"
    )
    for axis, ((group, shape), entries) in zip(axes.flat, found.items(), strict=False):
        ours = [entry["kernel"].startswith("ours") or group == "round" for entry in entries]
        bars = axis.bar([e["kernel"] for e in entries], [e["us"] for e in entries],
                        color=["C0" if mine else "C7" for mine in ours])  # fmt: skip
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
        bound = [(at, entry["roofline_us"]) for at, entry in enumerate(entries) if entry["bytes"]]
        for at, us in bound:
            axis.hlines(us, at - 0.45, at + 0.45, color="C3", linestyle="--", linewidth=1.2)
        if bound:
            axis.plot([], [], "--", color="C3", label=f"roofline, {bound[0][1]:.1f} us at the left")
            axis.legend(fontsize=7, loc="lower right")
        axis.set_title(f"{group} {shape}", fontsize=9)
        axis.set_ylabel("us", fontsize=8)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_xticks(
            range(len(entries)), [e["kernel"] for e in entries], rotation=30, ha="right", fontsize=7
        )
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    gpus = ", ".join(report["machine"]["gpus"]) or report["machine"]["cpu"]
    figure.suptitle(f"{gpus}; read bandwidth {report['bandwidth']['read'] / 1e12:.2f} TB/s", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--png", type=Path, help="write the plot to this file; needs matplotlib")
    args = parser.parse_args(argv)
    report = json.loads(args.file.read_text(encoding="utf-8"))
    print(text_table(report))
    if args.png:
        draw(report, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
