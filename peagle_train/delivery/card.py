"""The model card: what a stranger needs to know before serving the head, and the Hub's metadata.

Every figure comes from the head's own check, from export.json in the head's folder, or from the evaluation
of that very export; what is not recorded there is left out. Equal heads give equal cards, so pushing
the same head twice changes nothing: the card holds no date.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import ModelCardData

from peagle_train.delivery.manifest import FileEntry

if TYPE_CHECKING:
    from peagle_train.export.checks import HeadReport
    from peagle_train.head.config import Method

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The K of most published tables; the card says so where it stands in for a missing one.
DEFAULT_K = 5
_TAGS = ["speculative-decoding", "eagle3", "draft-model", "vllm"]


class _Wording(NamedTuple):
    """A method in words: its name, how its heads draft, what vLLM calls it, tags of its own."""

    name: str
    drafts: str
    served: str
    tags: tuple[str, ...]


_METHODS: dict[Method, _Wording] = {
    "peagle": _Wording(
        "P-EAGLE", "several tokens in one pass", "`eagle3` with `parallel_drafting` in vLLM", ("p-eagle",)
    ),
    "eagle3": _Wording("EAGLE-3", "several tokens one after the other", "`eagle3` in vLLM", ()),
}


@dataclass(frozen=True)
class CardFacts:
    """What the card is made from.

    report: what the check of the head proved.
    provenance: what the export recorded about the run, in export.json; empty for a head from elsewhere.
    acceptance: the evaluation's figures by prompt set and measure (`offline`, `loop`); empty: not measured.
    k: drafted tokens per step at which they were measured; None if nothing says so.
    title: the last part of the destination's name.
    serve: the command that serves the head once it is where `fetch` put it.
    fetch: the command that brings it there; None if vLLM fetches it by itself.
    """

    report: HeadReport
    provenance: Mapping[str, Any]
    acceptance: Mapping[str, Mapping[str, Mapping[str, Any]]]
    k: int | None
    title: str
    serve: str
    fetch: str | None


def make_card(facts: CardFacts, files: Mapping[str, FileEntry]) -> str:
    """The text of README.md. `files` are the head's own, without card and manifest."""
    sections = [
        f"---\n{_metadata(facts)}\n---",
        f"# {facts.title}",
        _introduction(facts),
        "## The head\n\n" + _table(("", ""), [*_method_rows(facts), *facts.report.rows()]),
        "## Acceptance\n\n" + _acceptance(facts),
        "## Serving\n\n" + _serving(facts),
        "## Files\n\n" + _files(files),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(facts: CardFacts) -> str:
    """The YAML block the Hub reads. The base model is named only if it is a model of the Hub."""
    target = facts.report.target or ""
    license_name = facts.provenance.get("license")
    return str(
        ModelCardData(
            base_model=target if _HUB_ID.fullmatch(target) else None,
            license=license_name if isinstance(license_name, str) else None,
            library_name="vllm",
            pipeline_tag="text-generation",
            tags=[*_TAGS, *_words(facts).tags],
        ).to_yaml()
    )


def _introduction(facts: CardFacts) -> str:
    words, target = _words(facts), f"`{facts.report.target}`" if facts.report.target else "its target"
    text = (
        f"A {words.name} drafter head for {target}: it drafts {words.drafts}, which the target then "
        "verifies, so the output is the target's own. It cannot generate text alone.\n\n"
        "Trained and checked with P-EAGLE Train."
    )
    if not isinstance(facts.provenance.get("license"), str):
        text += " No licence is recorded; a head is derived from its target, whose licence applies."
    return text


def _method_rows(facts: CardFacts) -> list[tuple[str, str]]:
    words = _words(facts)
    rows = [("method", f"{words.name}: {words.served}")]
    positions = facts.provenance.get("positions")
    if isinstance(positions, int):
        rows.append(("positions trained", str(positions)))
    if facts.k is not None:
        rows.append(("K, drafted tokens per step", str(facts.k)))
    return rows


def _words(facts: CardFacts) -> _Wording:
    return _METHODS[facts.report.config.method]


def _acceptance(facts: CardFacts) -> str:
    """One row a prompt set. Acceptance length = 1 + accepted tokens / drafts, greedy, chain drafting."""
    if not facts.acceptance:
        return "Not measured by the run that pushed this head."
    rows = [
        (
            name,
            measure,
            str(figures["prompts"]),
            f"{figures['acceptance_length']:.2f}",
            " ".join(f"{share:.2f}" for share in figures["per_position"]),
            f"{figures['num_drafts']:,}",
            f"{figures['num_accepted']:,}",
        )
        for name, measures in sorted(facts.acceptance.items())
        for measure, figures in sorted(measures.items(), reverse=True)
        if figures["prompts"]
    ]
    heads = ("set", "measure", "prompts", "acceptance length", "per position", "drafts", "accepted")
    k = "" if facts.k is None else f" K = {facts.k},"
    return (
        f"Held-out prompts,{k} temperature 0. Acceptance length = 1 + accepted tokens / drafts: the tokens "
        "one pass of the target yields. Offline: against the target's stored greedy answers; loop: through "
        "speculative decoding itself.\n\n" + _table(heads, rows)
    )


def _serving(facts: CardFacts) -> str:
    lines = [line for line in (facts.fetch, facts.serve) if line]
    note = (
        ""
        if facts.k is not None
        else f" No K is recorded for this head; the command drafts {DEFAULT_K} tokens."
    )
    return f"Needs vLLM 0.16 or later.{note}\n\n```bash\n" + "\n".join(lines) + "\n```"


def _files(files: Mapping[str, FileEntry]) -> str:
    rows = [(f"`{name}`", f"{entry.size:,}", f"`{entry.sha256}`") for name, entry in sorted(files.items())]
    return "`manifest.json` lists the same for programs; a folder without it is not complete.\n\n" + _table(
        ("file", "bytes", "SHA-256"), rows
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
