"""Coding requests made from the signatures and docstrings of Python's standard library.

Real text that is on every machine with Python. The sources are parsed (`ast`), never imported, so
the result does not depend on what a module does when it is loaded. Modules are the groups: all
functions of `json.decoder` are in the same split. A docstring that occurs twice (wrappers repeat
their originals) is used once, so no docstring is in two splits either.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.prompts.base import Message, Prompt, digest

# Names removed or deprecated between CPython 3.11 and 3.14, test suites, toys, and applications.
_SKIPPED_MODULES = """
    aifc antigravity asynchat asyncore audioop cgi cgitb chunk crypt distutils encodings ensurepip idlelib
    imghdr imp lib2to3 mailcap msilib nis nntplib ossaudiodev pipes pydoc_data smtpd sndhdr spwd sre_compile
    sre_constants sre_parse sunau telnetlib test this turtledemo uu venv xdrlib
""".split()  # noqa: SIM905 (as text it can be read and diffed)
_SKIPPED_PARTS = frozenset({"test", "tests", "__main__", "_vendor", "idle_test"})
_DEPRECATED = re.compile(r"\bdeprecat|\bobsolete|\bdo not use\b|\bremoved in\b", re.IGNORECASE)
_SHORTEST, _LONGEST, _FEWEST_WORDS = 45, 1200, 8

# Half of the requests show the function to complete, as completion benchmarks do; the others describe it.
_SHOWN = (
    "Complete this Python function:\n\n```python\n{code}\n```",
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Fill in the body of this function:\n\n```python\n{code}\n```",
    "Here is a Python signature with its docstring. Please implement it.\n\n```python\n{code}\n```",
)
_DESCRIBED = (
    "Write {what} in Python.\n\n{doc}",
    "Write {what}. {doc}",
    "{doc}\n\nHow would you write this in Python? Call it `{name}`.",
    "I need Python code for {what}. What it should do: {doc}",
    "Show me how {what} could be implemented in plain Python, with a short explanation.\n\n{doc}",
)


@dataclass(frozen=True)
class Documented:
    """One public function or method that carries a docstring."""

    module: str  # dotted, e.g. "email.utils"
    owner: str  # class name, or "" for a function
    name: str
    signature: str  # "def name(args) -> result:" on one line
    call: str  # "name(args)", without self
    doc: str  # cleaned docstring

    @property
    def path(self) -> str:
        """`module.Class.name`."""
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


@functools.cache  # several sets of a run draw from it, and parsing the library takes seconds
def load() -> list[Prompt]:
    """All requests, in a fixed order; `group` is the module."""
    seen: set[str] = set()
    prompts = []
    for function in sorted(documented(), key=lambda function: function.path):
        doc, prompt = " ".join(function.doc.lower().split()), request(function)
        if doc not in seen and prompt.text not in seen:
            seen.update((doc, prompt.text))
            prompts.append(prompt)
    return prompts


def request(function: Documented) -> Prompt:
    """The request for one function: its phrasing is chosen by the hash of its path."""
    number = digest(f"phrasing:{function.path}")
    if number % 2:
        template = _SHOWN[number // 2 % len(_SHOWN)]
        text = template.format(code=_shown(function))
    else:
        template = _DESCRIBED[number // 2 % len(_DESCRIBED)]
        what = f"a function `{function.call}`"
        if function.owner:
            what = f"the method `{function.call}` of a class `{function.owner}`"
        text = template.format(name=function.name, what=what, doc=_summary(function.doc))
    return Prompt(
        id=f"stdlib:{function.path}",
        messages=(Message("user", text),),
        group=function.module,
    )


def documented() -> Iterator[Documented]:
    """Every usable function of the standard library of the running Python."""
    root = Path(sysconfig.get_path("stdlib"))
    for module, path in _modules(root):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # templates and files in old syntax that the library ships as data
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _function(module, "", node)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from _function(module, node.name, member)


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Public modules: (dotted name, source file)."""
    for top in sorted(sys.stdlib_module_names):
        if top.startswith("_") or top in _SKIPPED_MODULES:
            continue
        package = root / top
        files = sorted(package.rglob("*.py")) if package.is_dir() else [root / f"{top}.py"]
        for path in files:
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            hidden = any(part.startswith("_") or part in _SKIPPED_PARTS for part in parts)
            if path.is_file() and not hidden:
                yield ".".join(parts), path


def _function(module: str, owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Documented]:
    raw = ast.get_docstring(node, clean=False)
    if raw is None or node.name.startswith(("_", "test")):
        return
    doc = inspect.cleandoc(raw)
    fenced = "```" in doc or '"""' in doc or "\\" in doc
    usable = _SHORTEST <= len(doc) <= _LONGEST and len(doc.split()) >= _FEWEST_WORDS
    if fenced or not usable or _DEPRECATED.search(doc):
        return
    arguments = ast.unparse(node.args)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    bare = re.sub(r"^(self|cls)(, )?", "", arguments) if owner else arguments
    yield Documented(
        module, owner, node.name, f"{prefix} {node.name}({arguments}){result}:", f"{node.name}({bare})", doc
    )


def _shown(function: Documented) -> str:
    """Signature and docstring as code; a method stands inside its class."""
    inner = "\n".join(f"    {line}".rstrip() for line in f'"""{function.doc}\n"""'.split("\n"))
    code = f"{function.signature}\n{inner}"
    if not function.owner:
        return code
    return f"class {function.owner}:\n\n" + "\n".join(f"    {line}".rstrip() for line in code.split("\n"))


def _summary(doc: str) -> str:
    """The first paragraph, and the second where the first is no more than a title."""
    paragraphs = [" ".join(part.split()) for part in doc.split("\n\n")]
    return paragraphs[0] if len(paragraphs[0]) >= _SHORTEST else " ".join(paragraphs[:2])
