"""The picture of acceptance by slot: drawn from a release's measurements, and recognised later as
the one that belongs to them by a digest in the PNG file.
"""

import hashlib
import importlib.util
import struct
from pathlib import Path

from flashmap.files import write_figure

from .contents import PICTURE
from .errors import ReleaseError
from .measurements import Measurement, slots_digest

SIGNATURE, KEY = b"\x89PNG\r\n\x1a\n", b"Comment"


def data_digest(measurements: list[Measurement]) -> str | None:
    """Digest of the numbers in the picture; None where there are none to draw."""
    if not any(measured.settings for measured in measurements):
        return None
    return hashlib.sha256(slots_digest(measurements).encode()).hexdigest()


def stated_digest(png: bytes) -> str | None:
    """The digest that a PNG file carries; None for any other file."""
    place = len(SIGNATURE)
    if not png.startswith(SIGNATURE):
        return None
    while place + 8 <= len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        name, _, text = png[place + 8 : place + 8 + size].partition(b"\0")
        if kind == b"tEXt" and name == KEY:
            return text.decode("latin-1")
        place += 12 + size  # length, kind, data, checksum
    return None


def require_current_picture(png: bytes | None, measurements: list[Measurement]) -> None:
    """Raise ReleaseError for a picture of other measurements; none at all is fine."""
    if png is None or (stated_digest(png) or "none") == data_digest(measurements):
        return
    raise ReleaseError(
        "picture",
        f"{PICTURE} that was drawn from other measurements",
        "the slots of eval/*.json",
        "draw it again: flashmap release card DIR",
        [PICTURE],
    )


def draw(measurements: list[Measurement], path: Path) -> bool:
    """Draw acceptance by slot into ``path``; returns whether there was anything to draw.

    Raises ReleaseError where matplotlib is missing, ValueError if it cannot be written.
    """
    digest = data_digest(measurements)
    if digest is None:
        return False
    if importlib.util.find_spec("matplotlib") is None:
        raise ReleaseError(
            "picture",
            "no matplotlib, which draws acceptance by slot",
            "matplotlib 3.8 or newer",
            "pip install matplotlib, or pass --no-picture",
        )
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for measured in measurements:
        for setting in measured.settings:
            slots = setting.overall.slots
            jumps = f"{setting.num_steps} jump{'s' if setting.num_steps > 1 else ''}"
            axes.plot(
                range(1, len(slots) + 1),
                [float("nan") if share is None else 100 * share for share in slots],
                marker="o",
                label=f"temperature {setting.temperature:g}, {jumps}",
            )
    axes.set_xlabel("slot")
    axes.set_ylabel("drafts kept where reached, %")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    # No version and no date, so that the same numbers give the same file.
    write_figure(path, figure, dpi=110, metadata={"Software": None, KEY.decode(): digest})
    return True
