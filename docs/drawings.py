"""The drawings of docs/kernels/ and docs/engine.md: how requests, tiles, warps and data move. They show no measurement.

    python docs/drawings.py            # writes docs/images/kernels/*.svg

Each function draws one picture on a canvas of 760 columns. Its texts fit their boxes in DejaVu Sans, the widest
of the usual fonts. Charts of measurements are those of benchmarks/report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "images" / "kernels"
WIDTH = 760
INK = "#1d2a35"
GREY = "#8d99ae"
PALE = "#eef1f5"
RED = "#d1495b"
PALE_RED = "#f3c9cd"
BLUE = "#30638e"
PALE_BLUE = "#cfdfec"
YELLOW = "#edae49"
PALE_YELLOW = "#fbe7c2"
Point = tuple[float, float]


class Drawing:
    """Boxes, texts and lines on white ground, so that the picture reads the same on a light and on a dark page."""

    def __init__(self, height: int, title: str) -> None:
        self.height = height
        self.title = title
        self.parts: list[str] = []

    def text(self, at: Point, text: str, size: int = 12, colour: str = INK, anchor: str = "middle", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{at[0]:g}" y="{at[1]:g}"'
        self.parts.append(
            f'<text {place} font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def box(
        self, at: Point, size: Point, *lines: str, fill: str = PALE, edge: str = GREY, text: int = 12, dashed: bool = False
    ) -> None:
        """A rectangle with centred lines of text."""
        (x, y), (width, height) = at, size
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{edge}"{dash}/>'
        )
        first = y + height / 2 - (len(lines) - 1) * (text + 4) / 2 + 0.36 * text
        for index, line in enumerate(lines):
            self.text((x + width / 2, first + index * (text + 4)), line, text)

    def line(self, *points: Point, arrow: bool = True, colour: str = INK, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        head = ' marker-end="url(#head)"' if arrow else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"{dash}{head}/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
                f'viewBox="0 0 {WIDTH} {self.height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def softmax() -> Drawing:
    """The worked example of index.md: one row, two tiles of two keys."""
    d = Drawing(300, "Online softmax: a row visits two tiles of keys and keeps m, l and acc")
    d.text((20, 32), "memory: K and V, tile by tile", anchor="start", colour=BLUE)
    d.box((190, 46), (150, 52), "tile 1: s = 1, 2", "V = 10, 20", fill=PALE_BLUE, edge=BLUE)
    d.box((390, 46), (150, 52), "tile 2: s = 4, 2", "V = 30, 40", fill=PALE_BLUE, edge=BLUE)
    d.text((20, 150), "registers: three values", anchor="start", colour=RED)
    d.text((20, 166), "for a row of Q", anchor="start", colour=RED)
    states = [("start", "m = -∞", "l = 0", "acc = 0"), ("m = 2", "l = 1.5", "acc = 25"), ("m = 4", "l = 1.625", "acc = 46.25")]
    for x, lines in zip((20, 220, 420), states, strict=True):
        d.box((x, 186), (110, 84), *lines, fill=PALE_RED, edge=RED)
    for x, alpha, weights in ((265, "alpha = 0", "p = 1/2, 1"), (465, "alpha = 1/4", "p = 1, 1/4")):
        d.line((x + 10, 98), (x + 10, 184))
        d.text((x + 18, 138), alpha, anchor="start")
        d.text((x + 18, 156), weights, anchor="start")
    d.line((130, 228), (218, 228))
    d.line((330, 228), (418, 228))
    d.line((530, 228), (588, 228))
    d.box((590, 186), (150, 84), "O = acc / l", "= 28.46", "lse = ln 26", fill=PALE_YELLOW, edge=YELLOW)
    d.text((665, 150), "written once, at the end")
    return d


def band() -> Drawing:
    """Rows 256 to 319 with a window of 128 keys to the left, in tiles of 64 keys."""
    d = Drawing(270, "The band of visible keys, and which tiles need a mask")
    left, unit = 130, 1.75
    kinds = [("skipped", PALE, GREY)] * 2 + [
        ("mask", PALE_YELLOW, YELLOW),
        ("no mask", PALE_RED, RED),
        ("mask", PALE_YELLOW, YELLOW),
    ]
    for index, (kind, fill, edge) in enumerate(kinds):
        d.box((left + 64 * unit * index, 50), (64 * unit, 150), fill=fill, edge=edge)
        d.text((left + 64 * unit * (index + 0.5), 224), kind)
        d.text((left + 64 * unit * index, 42), str(64 * index), size=11)
    d.text((left + 64 * unit * 5, 42), "320", size=11)
    d.text((left + 32 * unit, 22), "keys", anchor="middle")
    for y, row in ((65, 256), (125, 287), (185, 319)):
        d.text((left - 10, y + 4), f"row {row}", anchor="end")
        d.line((left + (row - 128) * unit, y), (left + (row + 1) * unit, y), arrow=False, colour=INK)
        d.text((left + (row - 128) * unit - 6, y + 4), str(row - 128), size=11, anchor="end")
    d.text((left + 128 * unit, 250), "lo = 128", size=11)
    d.text((left + 194 * unit, 250), "inner_lo = 191", size=11)
    d.text((left + 262 * unit, 250), "inner_hi = 256", size=11)
    d.text((left + 320 * unit, 250), "hi = 320", size=11)
    return d


def hopper() -> Drawing:
    """A thread block of the Hopper forward: one producer warp, rings in shared memory, two consumer warpgroups."""
    d = Drawing(380, "A thread block of the Hopper forward kernel")
    d.box((20, 60), (120, 250), fill="#ffffff")
    d.text((80, 50), "global memory")
    for y, name in ((76, "Q"), (136, "K"), (196, "V"), (256, "O")):
        d.box((36, y), (88, 40), name, fill=PALE_BLUE, edge=BLUE)
    d.box((190, 20), (130, 60), "producer warp", "24 registers a thread", fill=PALE_YELLOW, edge=YELLOW, text=11)
    d.box((190, 100), (190, 210), fill="#ffffff")
    d.text((285, 328), "shared memory: one ring each")
    for y, name, stages in ((112, "Q + tile", 2), (176, "K", 2), (240, "V", 2)):
        for stage in range(stages):
            d.box((202 + 86 * stage, y), (80, 50), name, f"stage {stage}", text=11)
    for y in (137, 201, 265):
        source = {137: 96, 201: 156, 265: 216}[y]
        d.line((124, source), (160, source), (160, y), (200, y))
    d.text((285, 354), "copies by the copy engine (TMA): no thread waits", colour=BLUE, size=11)
    for index, y in enumerate((100, 216)):
        d.box((470, y), (270, 94), fill=PALE_RED, edge=RED)
        d.text((605, y + 20), f"consumer warpgroup {index}: 64 rows of Q", bold=True, size=11)
        d.text((605, y + 42), "S = Q Kᵀ on the tensor cores (wgmma)", size=11)
        d.text((605, y + 60), "softmax in registers: m, l, P", size=11)
        d.text((605, y + 78), "O += P V on the tensor cores", size=11)
        d.line((380, y + 36), (468, y + 36))
        d.line((468, y + 66), (382, y + 66), dashed=True)
    d.text((425, 130), "full", size=11)
    d.text((425, 182), "empty", size=11)
    d.text((425, 246), "full", size=11)
    d.text((425, 298), "empty", size=11)
    d.line((255, 80), (255, 98))
    d.line((605, 310), (605, 366), (80, 366), (80, 298), dashed=True)
    d.text((470, 50), "full: the bytes of the copy are here", anchor="start", size=11)
    d.text((470, 68), "empty: all warpgroups have read the stage", anchor="start", size=11)
    return d


def turns() -> Drawing:
    """What producer, warpgroups and tensor cores do over time, with turns between the warpgroups.

    A turn is passed on when products have been issued, not when they are done (`_pass_turn` in the consumer). So nothing but
    the lengths of both phases keeps the products of the warpgroups apart.
    """
    d = Drawing(230, "Two warpgroups take turns: one multiplies while the other computes its softmax")
    unit = 78
    for y, name in ((50, "producer"), (100, "warpgroup 0"), (150, "warpgroup 1")):
        d.text((112, y + 20), name, anchor="end")
    for index, copies in enumerate(("K7 Q", "K6 V7", "", "K5 V6", "", "K4 V5", "")):
        if copies:
            d.box((124 + unit * index, 50), (unit - 4, 32), copies, fill=PALE_YELLOW, edge=YELLOW)
    products = ("S7", "S6, P7·V7", "S5, P6·V6", "S4, P5·V5")
    for group, y in ((0, 100), (1, 150)):
        for index in range(8 - group):
            step, softmax_turn = divmod(index, 2)
            x = 124 + unit * (index + group)
            if softmax_turn:
                d.box((x, y), (unit - 4, 32), f"softmax {7 - step}", text=11)
            else:
                d.box((x, y), (unit - 4, 32), products[step], fill=PALE_RED, edge=RED, text=11)
    d.text(
        (124, 206),
        "red: products on the tensor cores, at best one warpgroup at a time. Only the issue of products takes turns.",
        anchor="start",
        size=11,
    )
    d.line((124, 32), (740, 32))
    d.text((112, 36), "time", anchor="end")
    return d


def overlap() -> Drawing:
    """The softmax under P V: as written, as ptxas ordered it, and with a basic block that ends."""
    d = Drawing(270, "Exponentials under the product P V: as written, as compiled, and as it is now")
    rows = (
        ("as written", (("issue P V", 0, 80), ("softmax", 84, 190), ("wait P V", 278, 70))),
        ("as compiled", (("issue P V", 0, 80), ("wait P V", 84, 190), ("softmax", 278, 190))),
        ("now", (("issue P V", 0, 80), ("softmax", 84, 150), ("wait K", 238, 60), ("wait P V", 302, 70))),
    )
    for index, (name, steps) in enumerate(rows):
        y = 26 + 86 * index
        d.text((130, y + 20), name, anchor="end")
        for label, x, width in steps:
            red = label == "softmax"
            d.box((144 + x, y), (width, 30), label, fill=PALE_RED if red else PALE, edge=RED if red else GREY, text=11)
        d.box((228, y + 34), (190, 16), "tensor cores: P V", fill=PALE_BLUE, edge=BLUE, text=10)
    d.text((228, 176), "nothing is computed under P V", size=11, anchor="start")
    d.text((540, 200), "The wait for K ends a basic", anchor="start", size=11)
    d.text((540, 216), "block, and instructions do", anchor="start", size=11)
    d.text((540, 232), "not cross its end.", anchor="start", size=11)
    return d


def decode() -> Drawing:
    """Five sequences on one line of key blocks, cut into six equal shares."""
    d = Drawing(330, "Split KV: the key blocks of all sequences on one line, cut into equal shares")
    unit, left = 25, 130
    colours = [(PALE_RED, RED)] * 20 + [(PALE_BLUE, BLUE), (PALE_YELLOW, YELLOW), (PALE_BLUE, BLUE), (PALE_YELLOW, YELLOW)]
    d.text((left - 10, 58), "key blocks", anchor="end")
    for index, (fill, edge) in enumerate(colours):
        d.box((left + unit * index, 40), (unit - 2, 28), "a" if index < 20 else "bcde"[index - 20], fill=fill, edge=edge)
    d.text((left - 10, 122), "programs", anchor="end")
    for program in range(6):
        x = left + 4 * unit * program
        d.box((x + 2, 100), (4 * unit - 8, 34), f"program {program}")
        d.line((x + 2 * unit - 2, 70), (x + 2 * unit - 2, 98))
    for program in range(5):
        x = left + 4 * unit * program
        d.box((x + 2, 160), (4 * unit - 8, 44), "out, lse", "in float32", fill=PALE_RED, edge=RED, text=11)
        d.line((x + 2 * unit - 2, 134), (x + 2 * unit - 2, 158))
    d.box((left, 232), (20 * unit - 6, 34), "combine: weights exp(lse - max lse), in the order of the keys")
    for program in range(5):
        d.line((left + 4 * unit * program + 2 * unit - 2, 204), (left + 4 * unit * program + 2 * unit - 2, 230))
    d.line((left + 22 * unit - 2, 134), (left + 22 * unit - 2, 288))
    d.line((left + 10 * unit, 266), (left + 10 * unit, 288))
    d.box((left, 290), (20 * unit - 6, 28), "output of a", fill=PALE_BLUE, edge=BLUE)
    d.box((left + 20 * unit + 2, 290), (4 * unit - 8, 28), "b, c, d, e", fill=PALE_BLUE, edge=BLUE)
    return d


def latent() -> Drawing:
    """The Hopper kernel for latent decoding: four producer warps, one warpgroup for scores, two for the output."""
    d = Drawing(360, "Latent decoding on Hopper: a key is loaded once and used by both products")
    d.text((20, 30), "a key of the cache: 576 numbers", anchor="start", colour=BLUE)
    d.box((20, 40), (352, 34), "C: 512 numbers, also the value", fill=PALE_BLUE, edge=BLUE)
    d.box((376, 40), (110, 34), "R: 64, rotated", fill=PALE_YELLOW, edge=YELLOW)
    d.text((510, 54), "S = Q_c Cᵀ + Q_r Rᵀ", anchor="start")
    d.text((510, 72), "O = P C", anchor="start")
    d.box((20, 110), (120, 54), "4 producer warps", "copy pages", fill=PALE_YELLOW, edge=YELLOW, text=11)
    d.line((140, 137), (188, 137))
    d.box((190, 100), (250, 74), fill="#ffffff")
    for stage in range(4):
        d.box((198 + 60 * stage, 108), (54, 58), "32 keys", f"stage {stage}", text=11)
    d.text((315, 93), "ring in shared memory", size=11)
    d.box(
        (500, 100),
        (240, 74),
        "warpgroup of scores",
        "S of the next block, then",
        "the softmax of this block",
        fill=PALE_RED,
        edge=RED,
        text=11,
    )
    d.line((440, 137), (498, 137))
    d.line((620, 174), (620, 212))
    d.box((540, 214), (160, 44), "P and factors of O", "2 buffers, shared memory", text=11)
    for index, (x, columns) in enumerate(((60, "columns 0 to 255"), (270, "columns 256 to 511"))):
        d.box(
            (x, 236), (190, 66), f"warpgroup {index + 1} of the output", "O += P C", columns, fill=PALE_RED, edge=RED, text=11
        )
    d.line((540, 244), (462, 262))
    d.line((540, 250), (500, 276), (500, 324), (155, 324), (155, 304))
    d.line((290, 174), (290, 206), (155, 206), (155, 234))
    d.line((365, 174), (365, 234))
    d.text((380, 348), "The warpgroups of the output know nothing of keys but what these buffers say.", size=11)
    return d


def backward() -> Drawing:
    """The Hopper backward: what a thread block keeps, what it streams, and its five products."""
    d = Drawing(390, "The Hopper backward kernel: a thread block owns 128 keys and walks over the rows that see them")
    for y, lines, kept in (
        (20, ("K: 128 keys", "loaded once"), True),
        (64, ("Q: 64 rows", "at a time"), False),
        (170, ("V: 128 keys", "loaded once"), True),
        (214, ("dO: 64 rows", "at a time"), False),
    ):
        d.box((20, y), (130, 38), *lines, fill=PALE_YELLOW if kept else PALE_BLUE, edge=YELLOW if kept else BLUE, text=11)
        d.line((150, y + 19), (208, 196 if y > 100 else 46))
    d.box((210, 26), (180, 40), "1   Sᵀ = K Qᵀ", fill=PALE_RED, edge=RED)
    d.box((210, 176), (180, 40), "2   dPᵀ = V dOᵀ", fill=PALE_RED, edge=RED)
    d.box((210, 102), (180, 40), "Pᵀ = exp(Sᵀ - lse)", "in registers", text=11)
    d.box((210, 248), (180, 40), "dSᵀ = Pᵀ (dPᵀ - delta)", "in registers", text=11)
    d.line((300, 66), (300, 100))
    d.line((300, 216), (300, 246))
    d.line((390, 122), (404, 122), (404, 268), (392, 268))
    d.box((440, 102), (180, 40), "3   dV += Pᵀ dO", fill=PALE_RED, edge=RED)
    d.box((440, 248), (180, 40), "4   dK += dSᵀ Q", fill=PALE_RED, edge=RED)
    d.line((390, 114), (438, 114))
    d.line((390, 262), (438, 262))
    d.box((210, 326), (180, 44), "dSᵀ in shared memory,", "both warpgroups wait", text=11)
    d.line((300, 288), (300, 324))
    d.box((440, 328), (180, 40), "5   dQ = dS K", fill=PALE_RED, edge=RED)
    d.line((390, 348), (438, 348))
    d.box(
        (650, 102),
        (96, 186),
        "dK, dV:",
        "64 keys for",
        "each of two",
        "warpgroups,",
        "in registers",
        fill=PALE_YELLOW,
        edge=YELLOW,
        text=11,
    )
    d.line((620, 122), (648, 140))
    d.line((620, 268), (648, 250))
    d.box((650, 316), (96, 64), "dq accumulator,", "float32,", "added to", fill=PALE_BLUE, edge=BLUE, text=10)
    d.line((620, 348), (648, 348))
    return d


def block_sparse() -> Drawing:
    """A mask of blocks, the list of one row of it, and how producer and consumers walk over the list."""
    d = Drawing(330, "Block lists: the loop visits listed blocks only")
    left, top, unit = 70, 56, 34
    listed = {0: "p", 1: "fp", 2: "f-p", 3: "f-fp", 4: "f--fp", 5: "f-f-fp"}
    colours = {"f": (PALE_RED, RED), "p": (PALE_YELLOW, YELLOW), "-": ("#ffffff", PALE)}
    for row in range(6):
        for column in range(6):
            fill, edge = colours[listed[row][column] if column < len(listed[row]) else "-"]
            d.box((left + unit * column, top + unit * row), (unit - 2, unit - 2), fill=fill, edge=edge)
    d.text((left + 3 * unit, 40), "blocks of keys")
    d.text((left - 8, top + 3 * unit), "blocks", anchor="end")
    d.text((left - 8, top + 3 * unit + 16), "of rows", anchor="end")
    d.text((left, 286), "red: full block. yellow: partial", anchor="start", size=11)
    d.text((left, 302), "block, with one bit for each score.", anchor="start", size=11)
    d.line((left + 6 * unit + 4, top + 5.5 * unit), (318, top + 5.5 * unit), (318, 90), (338, 90))
    d.text((340, 58), "list of the last row", anchor="start")
    for index, (number, kind) in enumerate(((0, "f"), (2, "f"), (4, "f"), (5, "p"))):
        d.box((340 + 44 * index, 70), (40, 40), str(number), fill=colours[kind][0], edge=colours[kind][1])
    d.box(
        (340, 150), (170, 62), "producer", "reads one entry ahead,", "copies that block", fill=PALE_YELLOW, edge=YELLOW, text=11
    )
    d.line((425, 112), (425, 148))
    d.box((560, 150), (170, 62), "stage of the ring", "K, V and the number", "of the block", text=11)
    d.line((510, 181), (558, 181))
    d.box(
        (560, 250), (170, 62), "consumers", "use the number only at", "the edges of the band", fill=PALE_RED, edge=RED, text=11
    )
    d.line((645, 212), (645, 248))
    d.box((340, 262), (170, 38), "bits of partial blocks", fill=PALE_BLUE, edge=BLUE, text=11)
    d.line((510, 281), (558, 281))
    return d


def quantised() -> Drawing:
    """How packed weights reach the tensor cores without a copy in 16 bits in memory."""
    d = Drawing(320, "Quantised weights are unpacked in registers, on their way to the tensor cores")
    d.text((20, 34), "global memory", anchor="start", colour=BLUE)
    d.box((20, 46), (130, 60), "packed weights,", "scales", fill=PALE_BLUE, edge=BLUE)
    d.box((20, 200), (130, 60), "input, 2 to 128", "tokens", fill=PALE_BLUE, edge=BLUE)
    d.text((200, 34), "shared memory", anchor="start")
    d.box((200, 46), (160, 60), "ring of packed blocks,", "copied some ahead", text=11)
    d.box((200, 200), (160, 60), "tile of 16, 32, 64", "or 128 tokens", text=11)
    d.line((150, 76), (198, 76))
    d.line((150, 230), (198, 230))
    d.text((410, 34), "registers", anchor="start", colour=RED)
    d.box((410, 46), (160, 60), "unpack: pairs of 16-bit", "numbers, times scale", fill=PALE_RED, edge=RED, text=11)
    d.line((360, 76), (408, 76))
    d.box((410, 150), (160, 60), "wgmma: weights, inputs", "left operand: registers", fill=PALE_RED, edge=RED, text=11)
    d.line((490, 106), (490, 148))
    d.line((360, 230), (386, 230), (386, 192), (408, 192))
    overlapped = ("float8:", "a block is", "unpacked while", "the columns", "before it are", "multiplied")
    d.box((620, 46), (124, 164), *overlapped, fill=PALE_YELLOW, edge=YELLOW, text=11)
    d.box((410, 250), (160, 50), "sums in float32", fill=PALE_RED, edge=RED, text=11)
    d.line((490, 210), (490, 248))
    d.box((620, 250), (124, 50), "split K: a second", "kernel adds", text=11)
    d.line((570, 275), (618, 275))
    return d


def experts() -> Drawing:
    """From a router's choice to tiles of one expert, and back to tokens."""
    d = Drawing(300, "Experts: pairs of token and expert are sorted, multiplied in tiles of one expert, and summed")
    chosen = (("t0", "BC"), ("t1", "AC"), ("t2", "CD"), ("t3", "AC"))
    colours = {"A": (PALE_RED, RED), "B": (PALE_YELLOW, YELLOW), "C": (PALE_BLUE, BLUE), "D": (PALE, GREY)}
    d.text((70, 28), "1  route: top 2")
    for row, (token, experts) in enumerate(chosen):
        d.text((30, 58 + 44 * row + 16), token)
        for place, expert in enumerate(experts):
            d.box((48 + 40 * place, 58 + 44 * row), (34, 30), expert, fill=colours[expert][0], edge=colours[expert][1])
    d.text((252, 28), "2  sort, no atomics")
    pairs = [(token, expert) for expert in "ABCD" for token, experts in chosen if expert in experts]
    for index, (token, expert) in enumerate(pairs):
        d.box(
            (210, 44 + 28 * index), (84, 24), f"{expert}   {token}", fill=colours[expert][0], edge=colours[expert][1], text=11
        )
    d.line((134, 140), (204, 140))
    d.text((430, 28), "3  tiles of one expert")
    for index, (name, y, height) in enumerate((("A", 44, 52), ("B", 100, 24), ("C", 128, 108), ("D", 240, 24))):
        fill, edge = colours[name]
        d.box((360, y), (60, height), "inputs", fill=fill, edge=edge, text=10)
        d.text((432, y + height / 2 + 4), "by")
        d.box((444, y), (90, height), f"weights of {name}", fill=fill, edge=edge, text=10)
        d.line((296, y + height / 2), (358, y + height / 2))
        d.line((536, y + height / 2), (560, y + height / 2), arrow=False)
        d.line((560, 78 + 50 * index), (590, 78 + 50 * index))
    d.line((560, 70), (560, 252), arrow=False)
    d.text((668, 28), "4  sum, router's weights")
    for row, (token, experts) in enumerate(chosen):
        d.box((592, 60 + 50 * row), (152, 36), f"{token} = w {experts[0]}({token}) + w {experts[1]}({token})", text=11)
    d.text(
        (380, 288), "The grid has room for the most tiles that any routing may need, so the host reads nothing back.", size=11
    )
    return d


def states() -> Drawing:
    """A sequence of 41 tokens with pages of 16, and the step that computes three more."""
    d = Drawing(270, "State pages, the tail, and what a step reads and writes")
    d.text((20, 28), "positions", anchor="start")
    left = 130
    unit = 12
    for page in range(2):
        d.box((left + 16 * unit * page, 14), (16 * unit, 26), f"page {page}: frozen", fill=PALE_BLUE, edge=BLUE)
    d.box((left + 32 * unit, 14), (9 * unit, 26), "tail", fill=PALE_YELLOW, edge=YELLOW)
    d.box((left + 41 * unit, 14), (3 * unit, 26), "step", fill=PALE_RED, edge=RED)
    for position in (0, 16, 32):
        d.text((left + position * unit, 56), str(position), size=11)
    d.text((left + 41 * unit, 56), "41", size=11)
    d.text((20, 108), "state pages", anchor="start", colour=BLUE)
    for position in (16, 32):
        x = left + position * unit
        d.line((x, 62), (x, 84))
        d.box((x - 55, 86), (110, 40), f"S before {position}", "for all layers", fill=PALE_BLUE, edge=BLUE, text=11)
    d.text((20, 182), "ring of the slot", anchor="start", colour=YELLOW)
    d.box((left + 32 * unit, 160), (9 * unit, 40), "k, u, g of", "32 to 40", fill=PALE_YELLOW, edge=YELLOW, text=11)
    d.box((left + 41 * unit, 160), (3 * unit, 40), "41", "to 43", fill=PALE_RED, edge=RED, text=11)
    d.line((left + 32 * unit + 55, 106), (700, 106), (700, 220), (left + 44 * unit - 10, 220), (left + 44 * unit - 10, 202))
    d.line((left + 36 * unit, 200), (left + 36 * unit, 230), (left + 42 * unit, 230), (left + 42 * unit, 202))
    d.text((left, 256), "A step reads one state page and the tail, and writes its rows of the tail.", anchor="start")
    return d


def request() -> Drawing:
    """A request from its bytes to its tokens: who has it, and what bounds it there."""
    d = Drawing(330, "The life of a request: server, queue, steps of the engine, stream")
    d.text((20, 30), "server: the event loop", anchor="start", colour=BLUE)
    stages = (
        ("connection", "bytes, seconds"),
        ("key, body", "values, costs"),
        ("prompt", "template, tokens"),
        ("room", "max_waiting, 429"),
    )
    for index, lines in enumerate(stages):
        x = 20 + 186 * index
        d.box((x, 42), (160, 48), *lines, fill=PALE_BLUE, edge=BLUE)
        if index:
            d.line((x - 26, 66), (x - 2, 66))
    d.line((658, 90), (658, 128))
    d.text((20, 122), "engine: its thread or process", anchor="start", colour=RED)
    d.box((578, 130), (160, 56), "waiting", "clients take turns")
    d.box((392, 130), (160, 56), "admitted", "slot and pages;", "known prefix shared", text=11)
    d.box((206, 130), (160, 56), "prompt in chunks", "beside others' tokens", fill=PALE_RED, edge=RED)
    d.box((20, 130), (160, 56), "one token a step", "CUDA graph", fill=PALE_RED, edge=RED)
    for x in (578, 392, 206):
        d.line((x, 158), (x - 24, 158))
    d.line((60, 186), (60, 206), (140, 206), (140, 188))
    d.text((150, 210), "next step", anchor="start", size=11)
    d.line((290, 186), (290, 226), (658, 226), (658, 188), dashed=True)
    d.text((474, 220), "preempted: no page is free", size=11)
    d.line((40, 186), (40, 250))
    d.text((20, 320), "server", anchor="start", colour=BLUE)
    d.box((20, 252), (160, 48), "text", "stop strings, tools", fill=PALE_BLUE, edge=BLUE)
    d.box((206, 252), (160, 48), "event of the stream", "one for each step", fill=PALE_BLUE, edge=BLUE)
    d.box((392, 252), (160, 48), "client", "slow ones get fewer", "events", text=11)
    d.box((578, 252), (160, 48), "full pages stay", "in the prefix cache", fill=PALE_YELLOW, edge=YELLOW)
    d.line((180, 276), (204, 276))
    d.line((366, 276), (390, 276))
    d.line((100, 186), (100, 240), (640, 240), (640, 250), dashed=True)
    return d


def tree() -> Drawing:
    """Two queries of one sequence: each folds the groups of keys that it sees, which are cut at absolute positions."""
    d = Drawing(300, "The tree of deterministic attention: groups of 512 keys, folded from the left")
    left = 110.0
    width = 190.0
    d.text((20, 56), "keys", anchor="start", colour=BLUE)
    for group in range(3):
        x = left + group * (width + 20)
        d.text((x, 26), str(512 * group), size=11)
        for block in range(8):
            d.box((x + block * width / 8, 38), (width / 8, 30), fill=PALE_BLUE, edge=BLUE)
        d.line((x + width / 2, 68), (x + width / 2, 104))
        d.box((x, 106), (width, 40), f"group {group}: online softmax", "over its blocks of 64, in order", fill=PALE, text=11)
    d.text((20, 200), "query 700", anchor="start", colour=RED)
    d.text((20, 260), "query 1400", anchor="start", colour=RED)
    folds = (left + width + 20, left + 2 * (width + 20))
    d.box((folds[0], 180), (width, 36), "fold(group 0, group 1)", fill=PALE_RED, edge=RED)
    d.box((folds[0], 240), (width, 36), "fold(group 0, group 1)", fill=PALE_RED, edge=RED)
    d.box((folds[1], 240), (width, 36), "fold(that, group 2)", fill=PALE_RED, edge=RED)
    d.line((folds[0] + width, 258), (folds[1] - 2, 258))
    d.text((folds[1] + width / 2, 202), "group 2 is not visible", size=11, colour=GREY)
    return d


DRAWINGS: Sequence[Callable[[], Drawing]] = (
    softmax,
    band,
    hopper,
    turns,
    overlap,
    decode,
    latent,
    backward,
    block_sparse,
    quantised,
    experts,
    states,
    tree,
    request,
)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in DRAWINGS:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
