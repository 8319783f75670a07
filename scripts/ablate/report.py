"""The tables: for the terminal, and in Markdown between two marks of docs/ablation.md."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from peagle_train.errors import PeagleError
from peagle_train.files import write_text
from scripts.ablate.choose import Interval, Measured

BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"
BETTER, WORSE, SAME = "better", "worse", ""


@dataclass(frozen=True)
class Row:
    """One line: a variant, how many steps its trainings took, and how it stands beside the base."""

    group: str
    name: str
    steps: Sequence[int]
    measured: Measured
    is_base: bool = False

    def cells(self) -> list[str]:
        m = self.measured
        figures = ["/".join(f"{n:,}" for n in self.steps), f"{m.length:.3f}", _between(m.between)]
        if self.is_base:
            return [self.group, self.name, *figures, "", "", "", ""]
        seeds = "/".join(f"{gain:+.3f}" for gain in m.by_seed)
        verdict = BETTER if m.better else WORSE if m.worse else SAME
        return [
            self.group,
            self.name,
            *figures,
            f"{m.gain:+.3f}",
            _between(m.gain_between, "+"),
            seeds,
            verdict,
        ]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        m = self.measured
        return {
            "group": self.group,
            "variant": self.name,
            "steps": list(self.steps),
            "acceptance_length": round(m.length, 4),
            "interval": [round(x, 4) for x in m.between],
            "gain": round(m.gain, 4),
            "gain_interval": [round(x, 4) for x in m.gain_between],
            "gain_by_seed": [round(x, 4) for x in m.by_seed],
            "better": m.better,
        }


HEADINGS = ("group", "variant", "steps", "length", "95 %", "gain", "gain, 95 %", "by seed", "")


def terminal(title: str, rows: Sequence[Row]) -> Table:
    """To print with rich."""
    table = Table(title=title)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place in (0, 1, 8) else "right", no_wrap=True)
    last = None
    for row in rows:
        if last is not None and row.group != last:
            table.add_section()
        last = row.group
        table.add_row(*row.cells(), style="bold" if row.is_base else None)
    return table


def markdown(title: str, rows: Sequence[Row]) -> str:
    """The same for the docs."""
    aligned = ["---" if place in (0, 1, 8) else "---:" for place in range(len(HEADINGS))]
    lines = [f"**{title}**", "", "| " + " | ".join(HEADINGS) + " |", "|" + "|".join(aligned) + "|"]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines)


def put_between(path: Path, text: str) -> None:
    """Replaces what stands between the marks of a page. Raises PeagleError if it does not hold each once."""
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise PeagleError(f"{path}: expected the lines {BEGIN} and {END}, once each and in that order")
    before, rest = page.split(BEGIN)
    write_text(path, f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def commit() -> str:
    """The commit that is checked out, and whether tracked files differ from it; without git `no commit`."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str | None:
        try:
            ended = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return ended.stdout.strip() if ended.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "no commit"
    return f"{head} with changes" if git("status", "--porcelain", "--untracked-files=no") else head


def records(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[dict[str, Any]]]:
    """Every row of some tables, for JSON."""
    return {name: [row.record() for row in table] for name, table in rows.items()}


def _between(pair: Interval, sign: str = "") -> str:
    return f"{pair[0]:{sign}.3f} to {pair[1]:{sign}.3f}"
