"""A plot of a bench as one SVG file, without a plotting library: throughput and latency over concurrency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from portable_dit.server.bench import Point, ServerReport

WIDTH, HEIGHT = 880, 380
PANEL, GAP, LEFT, TOP, BOTTOM = 360, 80, 60, 60, 50
COLORS = {"p50": "#2a7de1", "p95": "#e1912a", "p99": "#d13a4c", "pictures": "#138a5e"}


def plot(report: ServerReport) -> str:
    """The SVG text."""
    title = f"{report.model} on {report.devices} x {report.device}, {report.size}"
    latency: dict[str, Callable[[Point], float | None]] = {
        "p50": lambda point: point.p50,
        "p95": lambda point: point.p95,
        "p99": lambda point: point.p99,
    }
    hourly: dict[str, Callable[[Point], float | None]] = {"pictures": lambda point: point.pictures_per_hour}
    body = [
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
        *_panel(LEFT, "pictures per hour", report.points, hourly),
        *_panel(LEFT + PANEL + GAP, "latency, seconds", report.points, latency),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1a1c24">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *body, "</svg>\n"])


def _panel(
    left: int, title: str, points: Sequence[Point], series: dict[str, Callable[[Point], float | None]]
) -> list[str]:
    """One pair of axes from zero, with a line for each series over the points in their order."""
    height = HEIGHT - TOP - BOTTOM
    values = [read(point) for read in series.values() for point in points]
    ticks = ticks_to(max((value for value in values if value is not None), default=1.0))
    step = PANEL / max(len(points), 1)

    def x(index: int) -> float:
        return left + step * (index + 0.5)

    def y(value: float) -> float:
        return TOP + height * (1 - value / ticks[-1])

    out = [f'<text x="{left}" y="{TOP - 12}" font-weight="600">{title}</text>']
    for tick in ticks:
        out.append(f'<path d="M{left} {y(tick):.1f}h{PANEL}" stroke="#dcdde6"/>')
        out.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, point in enumerate(points):
        at = f'x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        out.append(f'<text {at} text-anchor="middle">{point.concurrency}</text>')
    out.append(
        f'<text x="{left + PANEL / 2}" y="{HEIGHT - 12}" text-anchor="middle">requests at a time</text>'
    )
    for place, (name, read) in enumerate(series.items()):
        color = COLORS[name]
        drawn = [(index, value) for index, point in enumerate(points) if (value := read(point)) is not None]
        places = [(x(index), y(value)) for index, value in drawn]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{color}"/>' for across, down in places
        ]
        if len(series) > 1:
            at = f'x="{left + PANEL - 40 * (len(series) - place)}" y="{TOP - 12}"'
            out.append(f'<text {at} fill="{color}">{name}</text>')
    return out


def ticks_to(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, five to eight of them."""
    if not most > 0:
        return [0.0, 1.0]
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    count = math.ceil(most / step - 1e-9)
    return [round(step * k, 12) for k in range(count + 1)]
