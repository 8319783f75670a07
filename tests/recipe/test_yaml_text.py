"""YAML 1.2 scalars, lines, and what is refused."""

from __future__ import annotations

import math

import pytest

from peagle_train.recipe.yaml_text import dotted, dump, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("6.0e-4", 6e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("-7", -7),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("2024-01-02", "2024-01-02"),
        ("'3e-4'", "3e-4"),
        ("!!str 12", "12"),
        ("~", None),
        ("", None),
        ("null", None),
        ("[1, [2, x]]", [1, [2, "x"]]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("<repo_name>", "<repo_name>"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    document = parse(text)
    assert document.faults == []
    assert document.value == value
    assert type(document.value) is type(value)


def test_nan_is_read_so_that_the_schema_can_refuse_it() -> None:
    assert math.isnan(parse(".nan").value)


def test_every_key_and_item_has_its_line() -> None:
    document = parse("a: 1\nb:\n  c: [1,\n      2]\n  d: x\n")
    assert document.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 3,
        ("b", "c", 1): 4,
        ("b", "d"): 5,
    }


def test_a_repeated_key_is_a_fault_and_the_first_value_stands() -> None:
    document = parse("a: 1\nb:\n  c: 2\n  c: 3\n")
    assert document.faults == [(4, "b.c", "written twice (first on line 3); keep one of the two")]
    assert document.value == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: \x01\n", None, "not valid YAML"),
        ("a: !!python/object:os.system x\n", 1, "expected plain values only"),
        ("a: !!set {x}\n", 1, "expected plain values only"),
        ("a: !!int x\n", 1, "which is no int"),
        ("a: !!bool x\n", 1, "which is no bool"),
        ("? [1, 2]\n: 3\n", 1, "expected a word"),
        ("a: &x [*x]\n", 1, "contains itself"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, line: int | None, part: str) -> None:
    faults = parse(text).faults
    assert len(faults) == 1
    assert faults[0][0] == line
    assert part in faults[0][2]


def test_an_alias_repeats_a_value() -> None:
    assert parse("a: &x {k: 1}\nb: *x\n").value == {"a": {"k": 1}, "b": {"k": 1}}


def test_dump_is_read_back_equal() -> None:
    shared = [1, 2]
    value = {
        "text that looks like a number": "3e-4",
        "and like others": [
            "no",
            "true",
            "null",
            "~",
            "",
            "12",
            "0x1f",
            "1:30",
            "<repo_name>",
            "a: b",
            "# c",
            "é",
        ],
        "numbers": [1e-5, 3e-4, 0.1, 1e22, 5, -1, True, None],
        "twice": [shared, shared],
        "empty": [{}, []],
    }
    document = parse(dump(value))
    assert document.faults == []
    assert document.value == value
    assert list(document.value) == list(value)


def test_dotted() -> None:
    assert dotted(("head", "aux_layers", 1)) == "head.aux_layers[1]"
    assert dotted(()) == ""
