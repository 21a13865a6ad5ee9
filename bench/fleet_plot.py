"""Draws how policies compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fleet_simulation import Outcome
from matplotlib.figure import Figure

PANELS = {
    "hit_rate": "prompt tokens from the cache",
    "ttft_p90_s": "first token, p90, s",
    "itl_p99_s": "between tokens, p99, s",
    "imbalance": "load, max / mean",
}
COLOUR = "#3b6ea5"


def draw(policies: Mapping[str, Outcome], pooled_hit_rate: float, path: Path) -> None:
    """Write a PNG: one panel a figure, one bar a policy."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        bars = axes.barh(list(policies), [getattr(outcome, name) for outcome in policies.values()], color=COLOUR)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_title(title, fontsize="medium")
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(left=False, labelleft=axes is figure.axes[0])
        if name == "hit_rate":
            axes.axvline(pooled_hit_rate, color="black", linestyle="--")
            axes.text(pooled_hit_rate, len(policies) - 0.5, " one cache", va="bottom", fontsize="small")
    figure.savefig(path, format="png", dpi=150)
