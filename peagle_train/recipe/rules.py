"""What several keys of a recipe must be together.

A rule reads the keys it needs through a `View` and yields the faults it finds. A key that is itself
faulty cannot be read; the rules that need it are then left out while all others still speak, so that the
user sees every fault in one go instead of one per attempt.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

Broken = tuple[str, str]
"""A dotted key, and what is wrong with it."""


class Unreadable(Exception):
    """A rule asked for a key that has no valid value."""


def _no_default(key: tuple[str, ...]) -> Any:
    raise Unreadable(".".join(key))


class View:
    """The values of a recipe by dotted key, without the faulty ones.

    Args:
        values: the nested mapping as read from the file (the recipe is strict, so a valid value is never
            converted and can be used as it was read).
        faulty: keys, as tuples, whose values were refused.
        default: gives the default of a key that `values` lacks, or raises `Unreadable`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        faulty: Collection[tuple[str | int, ...]] = (),
        default: Callable[[tuple[str, ...]], Any] = _no_default,
    ):
        self._values = values
        self._faulty = faulty
        self._default = default

    def get(self, key: str) -> Any:
        """The value of a dotted key; raises `Unreadable` if it or a part of it is faulty."""
        path = tuple(key.split("."))
        for bad in self._faulty:
            shared = min(len(bad), len(path))
            if tuple(bad[:shared]) == path[:shared]:
                raise Unreadable(key)
        value: Any = self._values
        for part in path:
            if not isinstance(value, Mapping):
                raise Unreadable(key)
            if part not in value:
                return self._default(path)
            value = value[part]
        return value

    def names(self, key: str) -> list[str]:
        """The names under a section, faulty or not; none if it is no section."""
        value: Any = self._values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return list(value) if isinstance(value, Mapping) else []


def broken_rules(view: View) -> Iterator[Broken]:
    """Every fault that the rules below find."""
    for rule in _RULES:
        try:
            yield from rule(view)
        except Unreadable:
            continue


def _drafts_fit_what_was_trained(view: View) -> Iterator[Broken]:
    k, positions = view.get("evaluate.k"), view.get("train.positions")
    if k > positions:
        yield (
            "evaluate.k",
            f"found {k}; expected at most train.positions = {positions}, because positions that were never "
            f"trained draft noise; set evaluate.k={positions} or train.positions={k}",
        )


def _mask_token_fits_the_method(view: View) -> Iterator[Broken]:
    method, token = view.get("method"), view.get("head.mask_token")
    if method == "peagle" and token is None:
        yield (
            "head.mask_token",
            "missing; expected the id or text of a token that neither data nor template holds, because "
            "method peagle drafts from mask tokens; write `unused` to find one",
        )
    if method == "eagle3" and token is not None:
        yield (
            "head.mask_token",
            f"found {token}; expected none, because method eagle3 drafts one token after the other and "
            "has no mask token; leave it out (`head.mask_token=`), or set method=peagle",
        )


def _norm_output_has_a_use(view: View) -> Iterator[Broken]:
    if view.get("head.norm_output") and view.get("method") == "peagle":
        yield (
            "head.norm_output",
            "found true; expected false, because a peagle head feeds no state back; leave it out, or set "
            "method=eagle3",
        )


def _warmup_ends(view: View) -> Iterator[Broken]:
    warmup, steps = view.get("train.warmup_steps"), view.get("train.steps")
    if warmup >= steps:
        yield (
            "train.warmup_steps",
            f"found {warmup}; expected fewer than train.steps = {steps}, or the full rate is never reached",
        )


def _windows_have_layers(view: View) -> Iterator[Broken]:
    kinds, window, layers = (
        view.get("head.layer_types"),
        view.get("head.sliding_window"),
        view.get("head.layers"),
    )
    if kinds is not None and len(kinds) != layers:
        yield (
            "head.layer_types",
            f"found {len(kinds)} kinds; expected one for each of the {layers} layers of the head; change it "
            "or head.layers",
        )
    slides = "sliding_attention" in (kinds or ())
    if slides and window is None:
        yield (
            "head.sliding_window",
            "found none; expected the window of the sliding layers in head.layer_types; name it, for example "
            "sliding_window: 1024",
        )
    if window is not None and not slides:
        yield (
            "head.sliding_window",
            f"found {window}, but no layer of head.layer_types is sliding_attention; expected none; leave it "
            "out or name the sliding layers",
        )


def _one_start(view: View) -> Iterator[Broken]:
    if view.get("head.start_from") is not None and view.get("head.initialise") != "target":
        yield (
            "head.initialise",
            f"found {view.get('head.initialise')} beside head.start_from, whose weights it would throw away; "
            "expected one of the two; leave the other out",
        )


def _a_frozen_output_was_learned(view: View) -> Iterator[Broken]:
    if view.get("head.output") == "frozen" and view.get("head.initialise") == "random":
        yield (
            "head.output",
            "found frozen beside initialise: random; expected trained, because random output rows would "
            "never learn; write output: trained, or initialise: target",
        )


def _states_hold_the_targets_range(view: View) -> Iterator[Broken]:
    if view.get("states.dtype") == "float16" and view.get("target.dtype") == "bfloat16":
        yield (
            "states.dtype",
            "found float16 for a target in bfloat16; expected bfloat16 (the same size), because float16 ends "
            "at 65,504 and a large state would be stored as infinity",
        )


def _heldout_names_are_free(view: View) -> Iterator[Broken]:
    for name in view.names("data.heldout"):
        if name in ("train", "validation"):
            yield (
                f"data.heldout.{name}",
                f"found a held-out set named {name}; expected another name, because the prompts of "
                f"data.{name} are stored under this one",
            )


def _unseen_prompts_stay_unseen(view: View) -> Iterator[Broken]:
    """Two sets overlap if they take the same split of a source, or if one of them takes all of it."""
    seen = ["data.train", "data.validation"]
    later = ["data.validation", *(f"data.heldout.{name}" for name in view.names("data.heldout"))]
    uses = {"data.train": "trained on", "data.validation": "used to pick the checkpoint"}
    for first in seen:
        for second in later:
            if first == second:
                continue
            try:
                sources, split = _sources(view, first), view.get(f"{first}.split")
                other_sources, other_split = _sources(view, second), view.get(f"{second}.split")
            except Unreadable:
                continue
            shared = sorted(sources & other_sources)
            if shared and (split == other_split or "all" in (split, other_split)):
                yield (
                    second,
                    f"found split {other_split} of {shared[0]}, but {first} takes split {split} of it; "
                    f"expected prompts that are not {uses[first]}; choose different splits "
                    "(train, validation, heldout share no prompt) or another source",
                )


def _sources(view: View, key: str) -> set[str]:
    """The sources of a prompt set, as paths that can be compared."""
    mix = view.get(f"{key}.mix")
    named = [view.get(f"{key}.source")] if mix is None else [part["source"] for part in mix]
    if None in named:
        raise Unreadable(key)
    return {os.path.normpath(source) for source in named}


def _a_set_has_sources(view: View) -> Iterator[Broken]:
    for key in ("data.train", "data.validation", *(f"data.heldout.{n}" for n in view.names("data.heldout"))):
        try:
            source, mix = view.get(f"{key}.source"), view.get(f"{key}.mix")
        except Unreadable:
            continue
        if (source is None) == (mix is None):
            yield (
                f"{key}.source",
                f"found {'neither `source` nor `mix`' if mix is None else '`source` beside `mix`'}; expected "
                "one of the two: `source: stdlib`, or `mix:` with a list of sources and weights",
            )


def _a_bounded_store_has_a_cap(view: View) -> Iterator[Broken]:
    mode, cap = view.get("states.mode"), view.get("states.cap")
    if (mode == "bounded") != (cap is not None):
        yield (
            "states.cap",
            f"found {'none' if cap is None else cap} beside states.mode {mode}; expected a cap with mode "
            "bounded and with no other; write how many GB may lie on the disk, or leave it out",
        )


def _states_beside_training_are_not_stored(view: View) -> Iterator[Broken]:
    mode = view.get("states.mode")
    if mode == "stored":
        return
    for key, nothing in (("states.backend", "hf"), ("states.url", None), ("train.skip_bad_rows", False)):
        try:
            value = view.get(key)
        except Unreadable:
            continue
        if value != nothing:
            yield (
                key,
                f"found {value} beside states.mode {mode}; "
                "expected it left out, because it belongs to states stored before training; leave it out or "
                "write states.mode: stored",
            )


def _tensors_are_split_by_vllm(view: View) -> Iterator[Broken]:
    if view.get("target.parallel") != "tensor":
        return
    needed = {"states.backend": view.get("states.backend") == "vllm", "data.server": view.get("data.server")}
    missing = [key for key, there in needed.items() if not there]
    if missing:
        yield (
            "target.parallel",
            f"found tensor without {' and '.join(missing)}; expected states.backend: vllm and data.server, "
            "because vLLM splits matrices and transformers here does not; set them, or parallel: layers",
        )


def _an_entity_has_its_tracker(view: View) -> Iterator[Broken]:
    entity = view.get("track.entity")
    if entity is not None and "wandb" not in view.get("track.log_with"):
        yield (
            "track.entity",
            f"found {entity}, but track.log_with does not name wandb, which alone has such a thing; leave it "
            "out, or add wandb",
        )


_RULES: tuple[Callable[[View], Iterator[Broken]], ...] = (
    _mask_token_fits_the_method,
    _norm_output_has_a_use,
    _a_set_has_sources,
    _a_bounded_store_has_a_cap,
    _states_beside_training_are_not_stored,
    _tensors_are_split_by_vllm,
    _an_entity_has_its_tracker,
    _drafts_fit_what_was_trained,
    _warmup_ends,
    _windows_have_layers,
    _one_start,
    _a_frozen_output_was_learned,
    _states_hold_the_targets_range,
    _heldout_names_are_free,
    _unseen_prompts_stay_unseen,
)
