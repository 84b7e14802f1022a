"""Draw the figures of concepts.md and README: ``python docs/pictures/draw.py`` writes the SVG files beside itself."""

from __future__ import annotations

from pathlib import Path

IB, ROCE, ETH, INK, PALE = "#2b6cb0", "#b7791f", "#718096", "#1a202c", "#f7fafc"
FONT = "font-family='system-ui,sans-serif'"


def text(x: float, y: float, words: str, size: int = 14, anchor: str = "middle", color: str = INK) -> str:
    return f"<text x='{x}' y='{y}' font-size='{size}' text-anchor='{anchor}' fill='{color}' {FONT}>{words}</text>"


def box(x: float, y: float, w: float, h: float, color: str, fill: str = PALE, width: int = 2) -> str:
    return (
        f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' stroke='{color}' stroke-width='{width}'/>"
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: int = 3, dash: str = "") -> str:
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{color}' stroke-width='{width}'{dashed}/>"


def svg(width: int, height: int, title: str, *parts: str) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>"
        f"<title>{title}</title><rect width='{width}' height='{height}' fill='white'/>" + "\n".join(parts) + "</svg>\n"
    )


def nodes(x: float, color: str, names: list[str]) -> list[str]:
    made = []
    for i, name in enumerate(names):
        made += [
            box(x + 85 * i, 60, 70, 44, color),
            text(x + 35 + 85 * i, 87, name),
            line(x + 35 + 85 * i, 104, x + 35 + 85 * i, 128, color),
            line(x + 20 + 85 * i, 60, x + 20 + 85 * i, 40, ETH, 2),
        ]
    return [*made, line(x + 20, 128, x + 85 * len(names) - 30, 128, color, 5)]


def fabric() -> str:
    """Two fabrics and one Ethernet."""
    return svg(
        760,
        190,
        "Two fabrics: RDMA inside each, Ethernet between them",
        line(20, 40, 740, 40, ETH, 3),
        text(380, 28, "Ethernet, 25 Gb/s: reaches every node", color=ETH),
        *nodes(30, IB, ["ib1", "ib2", "ib3", "ib4"]),
        *nodes(410, ROCE, ["roce1", "roce2", "roce3", "roce4"]),
        text(190, 155, "fabric a: InfiniBand, 200 Gb/s", color=IB),
        text(570, 155, "fabric b: RoCE, 200 Gb/s", color=ROCE),
        text(380, 180, "No RDMA between the fabrics", 13),
    )


def stage() -> str:
    """Draw a model cut into two stages."""
    layers = [box(25 + 22 * i, 62, 18, 50, IB if i < 16 else ROCE, IB if i < 16 else ROCE, 0) for i in range(30)]
    return svg(
        720,
        200,
        "Thirty layers cut into two stages",
        text(360, 26, "A model of 30 layers, cut into two stages"),
        *layers,
        text(200, 140, "stage 0: 16 layers on the faster pool", color=IB),
        text(530, 140, "stage 1: 14 layers", color=ROCE),
        line(376, 50, 376, 124, INK, 2, "5 4"),
        text(376, 165, "crosses here, per micro-batch: one activation forward, one gradient back", 13),
        text(376, 186, "stays inside: the gradients of all parameters, gigabytes per step", 13),
    )


def transport() -> str:
    """Which group uses which network."""
    made = []
    for row, color, name in ((0, IB, "stage 0, InfiniBand"), (1, ROCE, "stage 1, RoCE")):
        y = 50 + 110 * row
        made.append(text(15, y + 28, name, 13, "start", color))
        for i in range(4):
            made += [box(170 + 120 * i, y, 80, 44, color), text(210 + 120 * i, y + 27, f"rank {4 * row + i}", 13)]
            if i < 3:
                made.append(line(250 + 120 * i, y + 22, 290 + 120 * i, y + 22, color, 5))
        if row == 0:
            made += [line(210 + 120 * i, y + 44, 210 + 120 * i, y + 110, ETH, 2, "5 4") for i in range(4)]
    return svg(
        700,
        250,
        "A transport for every group",
        text(350, 26, "Each group of ranks has its own transport"),
        *made,
        text(660, 130, "TCP", 13, "end", ETH),
        text(350, 228, "thick: data-parallel groups, RDMA; dashed: pipeline edges, TCP over Ethernet", 13),
    )


def ahead() -> str:
    """Draw eager 1F1B: the same passes, with the transfers hidden."""

    def lane(y: int, name: str, passes: list[tuple[float, float, str, str]]) -> list[str]:
        made = [text(10, y + 20, name, 13, "start")]
        for start, length, label, color in passes:
            x = 110 + 44 * start
            made += [
                box(x, y, 44 * length - 2, 30, color, color, 0),
                text(x + 22 * length - 1, y + 20, label, 12, color="white" if color != "#e2e8f0" else INK),
            ]
        return made

    wait = "#e2e8f0"
    waits = [
        *lane(
            50,
            "stage 0",
            [
                (0, 1, "F1", IB),
                (1, 1, "F2", IB),
                (2, 4, "waits", wait),
                (6, 1, "B1", ETH),
                (7, 1, "F3", IB),
                (8, 3, "waits", wait),
                (11, 1, "B2", ETH),
            ],
        ),
        *lane(
            90,
            "stage 1",
            [
                (0, 2, "waits", wait),
                (2, 1, "F1", IB),
                (3, 1, "B1", ETH),
                (4, 1, "F2", IB),
                (5, 1, "B2", ETH),
                (6, 3, "waits", wait),
                (9, 1, "F3", IB),
                (10, 1, "B3", ETH),
            ],
        ),
    ]
    runs = [
        *lane(
            180,
            "stage 0",
            [
                (0, 1, "F1", IB),
                (1, 1, "F2", IB),
                (2, 1, "F3", IB),
                (3, 1, "F4", IB),
                (4, 1, "F5", IB),
                (5, 1, "B1", ETH),
                (6, 1, "F6", IB),
                (7, 1, "B2", ETH),
                (8, 1, "F7", IB),
                (9, 1, "B3", ETH),
                (10, 1, "F8", IB),
                (11, 1, "B4", ETH),
            ],
        ),
        *lane(
            220,
            "stage 1",
            [
                (0, 2, "waits", wait),
                (2, 1, "F1", IB),
                (3, 1, "B1", ETH),
                (4, 1, "F2", IB),
                (5, 1, "B2", ETH),
                (6, 1, "F3", IB),
                (7, 1, "B3", ETH),
                (8, 1, "F4", IB),
                (9, 1, "B4", ETH),
                (10, 1, "F5", IB),
                (11, 1, "B5", ETH),
            ],
        ),
    ]
    return svg(
        660,
        280,
        "Eager 1F1B hides the transfers",
        text(10, 35, "1F1B over a slow link: stages wait for every transfer", 14, "start"),
        *waits,
        text(10, 165, "eager 1F1B: stage 0 holds more micro-batches and computes during transfers", 14, "start"),
        *runs,
        text(10, 272, "F: forward, B: backward of a micro-batch; not to scale", 12, "start"),
    )


if __name__ == "__main__":
    for draw in (fabric, stage, transport, ahead):
        (Path(__file__).parent / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
