"""The prompts of every set of a run, each source read once.

sources ──► rows ──► prompts ──► split by the hash of their content ──► candidates of each part of each set
(files,     bad ones are         the same in every order of the rows     in the order of their hashes: the
 Hub)       counted and quoted                                           first `count` that can be asked
"""

from __future__ import annotations

import hashlib
import heapq
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from data_prep.prompts import humaneval, stdlib
from data_prep.prompts.base import Prompt, digest, split_of, spread
from data_prep.prompts.contamination import Benchmarks
from data_prep.prompts.hub import PREFIX, read_hub, revision_of
from data_prep.prompts.presets import BENCHMARKS, PRESETS, spelled_out
from data_prep.prompts.rejects import Rejects
from data_prep.prompts.rows import Row, read_files
from data_prep.prompts.shapes import BadRowError, prompt_of
from peagle_train.errors import PeagleError
from peagle_train.files import sha256_of
from peagle_train.recipe.data import DataSection, MixPart, PromptSet

_BUILT_IN: dict[str, Callable[[], list[Prompt]]] = {"stdlib": stdlib.load, "humaneval": humaneval.load}
CONTAMINATED = "text of a benchmark"

Turns = Literal["last", "each"]


@dataclass
class Candidates:
    """Prompts of one part of a set, in the order in which they are taken, and how many are wanted."""

    prompts: list[Prompt]
    count: int | None  # None: all
    repeats: int = 0  # rows left out because the part has the text already
    contaminated: int = 0  # left out for text of a benchmark
    source: str = ""


@dataclass
class _Sink:
    """Where the prompts of one part of one set are gathered, no more of them than may be needed."""

    section: PromptSet
    count: int | None
    repeats: int = 0
    _kept: dict[int, Prompt] = field(default_factory=dict)  # by the hash of their text
    _heap: list[int] = field(default_factory=list)  # those hashes, negative: the largest first

    @property
    def room(self) -> int | None:
        """Some turn out too long or repeated later on."""
        return None if self.count is None else 2 * self.count + 1000

    @property
    def full(self) -> bool:
        return self.room is not None and len(self._kept) >= self.room

    def add(self, prompt: Prompt, bounded: bool) -> None:
        """bounded: groups are single prompts, so the order in which they are taken is known already."""
        if self.section.split not in ("all", split_of(prompt.group)):
            return
        number = digest(prompt.text or prompt.group)
        if number in self._kept:
            self.repeats += 1
            return
        self._kept[number] = prompt
        if bounded and self.room is not None:
            heapq.heappush(self._heap, -number)
            if len(self._heap) > self.room:
                del self._kept[-heapq.heappop(self._heap)]

    @property
    def prompts(self) -> list[Prompt]:
        return spread(list(self._kept.values()))


def collect(data: DataSection, rejects: Rejects | None = None) -> dict[str, list[Candidates]]:
    """Candidates of every part of every set, in the order train, validation, held-out sets.

    rejects: counts and quotes the bad rows; the caller closes it.
    Raises PeagleError: an unknown source, an empty split, too few prompts, training on a benchmark.
    """
    rejects = rejects or Rejects()
    sets = {"train": data.train, "validation": data.validation, **data.heldout}
    sinks: dict[str, list[_Sink]] = {}
    readers: dict[str, tuple[MixPart, list[_Sink]]] = {}
    for name, section in sets.items():
        _refuse_benchmarks(name, section)
        counts = shares(section, set_key(name))
        sinks[name] = [_Sink(section, count) for count in counts]
        for part, sink in zip(section.parts, sinks[name], strict=True):
            whole = spelled_out(part)
            readers.setdefault(_key(whole), (whole, []))[1].append(sink)
    for part, wanting in readers.values():
        bounded = part.source not in _BUILT_IN
        for prompt in prompts_of(part, data.turns, rejects):
            for sink in wanting:
                sink.add(prompt, bounded)
            if part.source.startswith(PREFIX) and all(sink.full for sink in wanting):
                break
    benchmarks = _benchmarks(data)
    found: dict[str, list[Candidates]] = {}
    for name, section in sets.items():
        found[name] = []
        for part, sink in zip(section.parts, sinks[name], strict=True):
            prompts = sink.prompts
            if benchmarks is not None and name in ("train", "validation"):
                prompts = [prompt for prompt in prompts if not benchmarks.hold(prompt.text)]
            contaminated = len(sink.prompts) - len(prompts)
            if len(prompts) < (sink.count or 1):
                raise PeagleError(
                    f"data.{set_key(name)}: source {part.source!r}, split {section.split!r} has "
                    f"{len(prompts)} different prompts; {sink.count or 'at least 1'} asked for: lower "
                    "`count` or choose another split"
                )
            found[name].append(Candidates(prompts, sink.count, sink.repeats, contaminated, part.source))
    return found


def prompts_of(part: MixPart, turns: Turns, rejects: Rejects) -> Iterator[Prompt]:
    """Every prompt of one source; bad rows go to `rejects`. Raises PeagleError for a source without rows."""
    if part.source in _BUILT_IN:
        yield from _BUILT_IN[part.source]()
        return
    name = PurePosixPath(part.source.removeprefix(PREFIX)).name.split(".")[0]
    rows = 0
    for row in _rows(part):
        rejects.count(part.source)
        rows += 1
        if row.value is None:
            rejects.add(part.source, row, row.fault)
            continue
        try:
            yield prompt_of(row.value, part, name, turns)
        except BadRowError as error:
            rejects.add(part.source, row, str(error))
    if not rows:
        raise PeagleError(
            f"{part.source}: holds no rows; expected one JSON object a line, or a table with rows"
        )


def shares(section: PromptSet, key: str) -> list[int | None]:
    """How many prompts each part gives: `count` by weight, exact to a row; None: all of them.

    Raises PeagleError for weights without a count, which would mean nothing.
    """
    parts = section.parts
    if section.count is None:
        if len({part.weight for part in parts}) > 1:
            raise PeagleError(
                f"data.{key}.count: missing beside a mix with weights; expected how many prompts all parts "
                "give together; without weights each part gives all it has"
            )
        return [None] * len(parts)
    total = sum(part.weight for part in parts)
    exact = [section.count * part.weight / total for part in parts]
    whole = [int(share) for share in exact]
    by_rest = sorted(range(len(parts)), key=lambda i: (whole[i] - exact[i], i))
    for index in by_rest[: section.count - sum(whole)]:
        whole[index] += 1
    if 0 in whole:
        none = parts[whole.index(0)].source
        raise PeagleError(f"data.{key}.count: {section.count} prompts leave none for {none!r}; raise it")
    return list(whole)


def set_key(name: str) -> str:
    """Where a set stands in the recipe, below `data`."""
    return name if name in ("train", "validation") else f"heldout.{name}"


def prove_disjoint(chosen: Iterable[tuple[str, str, str]]) -> None:
    """Raises PeagleError, naming both, if a text is in two sets. chosen: (set, id, text) of every prompt."""
    owner: dict[str, tuple[str, str]] = {}
    for name, identity, text in chosen:
        other, first = owner.setdefault(text, (name, identity))
        if other != name:
            raise PeagleError(
                f"data.{set_key(other)} and data.{set_key(name)} share a prompt: {first} and {identity} have "
                f"the same text ({text[:60]!r}); sets must be disjoint: use different splits or files"
            )


def sources_fingerprint(data: DataSection) -> dict[str, str]:
    """What prompts depend on besides the recipe, by source.

    The Python version; a package's file; a commit of the Hub; of files the rows, in whatever order and
    however many files: rows that were shuffled ask nothing new.
    """
    parts = [part for s in (data.train, data.validation, *data.heldout.values()) for part in s.parts]
    parts += [MixPart(source=source) for source in data.decontaminate]
    found: dict[str, str] = {}
    for part in map(spelled_out, parts):
        if part.source in found:
            continue
        if part.source == "stdlib":
            found["stdlib"] = f"Python {platform.python_version()}"
        elif part.source == "humaneval":
            found["humaneval"] = sha256_of(humaneval.data_file())
        elif part.source.startswith(PREFIX):
            found[part.source] = revision_of(part)
        else:
            found[part.source] = _of_rows(read_files(part.source))
    return found


def _of_rows(rows: Iterable[Row]) -> str:
    total, count = 0, 0
    for row in rows:
        text = row.raw if row.value is None else json.dumps(row.value, sort_keys=True, default=str)
        total += int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
        count += 1
    return f"{count} rows {total % (1 << 128):032x}"


def _rows(part: MixPart) -> Iterator[Row]:
    return read_hub(part) if part.source.startswith(PREFIX) else read_files(part.source)


def _key(part: MixPart) -> str:
    return part.model_dump_json(exclude={"weight"})


def _benchmarks(data: DataSection) -> Benchmarks | None:
    if not data.decontaminate:
        return None
    parts = [spelled_out(MixPart(source=source)) for source in data.decontaminate]
    prompts = (prompt for part in parts for prompt in prompts_of(part, "each", Rejects()))
    return Benchmarks(message.content for prompt in prompts for message in prompt.messages)


def _refuse_benchmarks(name: str, section: PromptSet) -> None:
    known = {_place(preset.keys): bench for bench, preset in PRESETS.items() if preset.benchmark}
    for part in section.parts:
        bench = part.source if part.source in BENCHMARKS else known.get(_place(spelled_out(part)))
        if bench is None:
            continue
        if name in ("train", "validation"):
            raise PeagleError(
                f"data.{name}: `{bench}` is a benchmark to report on; a head trained or chosen on it proves "
                "nothing: put it under data.heldout"
            )
        if section.split != "all":
            raise PeagleError(
                f"data.{set_key(name)}: `{bench}` is a benchmark and has no split {section.split!r}; use "
                "split: all, under data.heldout"
            )


def _place(part: MixPart) -> Sequence[str | None]:
    return (part.source, part.subset, part.part)
