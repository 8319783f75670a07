"""YAML as version 1.2 reads it, with the line of every key.

PyYAML follows version 1.1: `3e-4` is text, `no` and `off` are booleans, `1:30` is ninety, `010` is eight,
and of two equal keys the last wins without a word. Each of these has spoiled somebody's run, so scalars
are read by the core schema of YAML 1.2 and a repeated key is a fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_SCALARS: tuple[tuple[str, str, str], ...] = (
    # tag, pattern (YAML 1.2.2, section 10.3.2), characters it may start with ("" = the empty scalar)
    ("null", r"^(?:null|Null|NULL|~|)$", "nN~"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own protocol)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own protocol)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _SCALARS:
    for _side in (_Loader, _Dumper):
        _characters = [*_first, ""] if _name == "null" else list(_first)
        _side.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _characters)

Path = tuple[str | int, ...]


@dataclass
class Document:
    """A YAML document as plain values.

    Attributes:
        value: mappings, lists, text, numbers, booleans, None.
        lines: the line (from 1) of every key and list item, by its path.
        faults: (line or None, dotted key, message) of everything that could not be read.
    """

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[tuple[int | None, str, str]] = field(default_factory=list)


def parse(text: str) -> Document:
    """Reads one YAML document; faults are listed in the result, not raised."""
    document = Document()
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "; ".join(part for part in (error.context, error.problem) if part)
        document.faults.append((mark.line + 1 if mark else None, "", f"not valid YAML: {what}"))
        return document
    except yaml.YAMLError as error:
        document.faults.append((None, "", f"not valid YAML: {error}"))
        return document
    if node is not None:
        document.value = _plain(node, (), document, ())
    return document


def dump(value: Any) -> str:
    """Plain values as YAML that `parse` reads back equal, keys in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dotted(path: Path) -> str:
    """`("head", "aux_layers", 1)` as `head.aux_layers[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _plain(node: yaml.Node, path: Path, document: Document, above: tuple[int, ...]) -> Any:
    line = node.start_mark.line + 1
    if id(node) in above:
        document.faults.append((line, dotted(path), "an alias that contains itself; write the value out"))
        return None
    inside = (*above, id(node))
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, document, inside)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        items = []
        for index, item in enumerate(node.value):
            document.lines[(*path, index)] = item.start_mark.line + 1
            items.append(_plain(item, (*path, index), document, inside))
        return items
    if isinstance(node, yaml.ScalarNode):
        kind = node.tag.removeprefix(_TAG)
        if kind in _READERS:
            try:
                return _READERS[kind](node.value)
            except ValueError:
                document.faults.append((line, dotted(path), f"found {node.value!r}, which is no {kind}"))
                return None
    document.faults.append((line, dotted(path), f"found the YAML tag {node.tag}; expected plain values only"))
    return None


def _mapping(
    node: yaml.MappingNode, path: Path, document: Document, inside: tuple[int, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.faults.append((line, dotted(path), "a key is a list or section; expected a word"))
            continue
        here: Path = (*path, key_node.value)
        if key_node.value in values:
            first = document.lines[here]
            document.faults.append(
                (line, dotted(here), f"written twice (first on line {first}); keep one of the two")
            )
            continue
        document.lines[here] = line
        values[key_node.value] = _plain(value_node, here, document, inside)
    return values


def _integer(text: str) -> int:
    return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_READERS: dict[str, Any] = {
    "null": lambda text: None,
    "bool": _boolean,
    "int": _integer,
    "float": _float,
    "str": str,
}
