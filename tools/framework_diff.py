"""What changed between two versions of a framework, of all that this package uses: the first step of taking one in.

    python tools/framework_diff.py vllm OLD NEW
    python tools/framework_diff.py sglang OLD NEW

OLD and NEW are folders: environments, `site-packages`, or unpacked wheels. Nothing is imported: both versions are read
as source, so neither has to run here. Four lists come out, each with one line a change:

- names: what our adapter imports, and the members it uses of each class: gone, moved, another signature, another
  default, another base class. A line that begins with "gone" ends the script with exit code 1;
- settings: fields of configurations and server arguments: new, gone, another default or type;
- variables: environment variables of the framework: new or gone;
- unlisted: settings and variables of NEW that are in no row of our adapter's table (`flags.py`): who acts on them?
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

ADAPTERS = Path(__file__).parents[1] / "src" / "atom_plugin"
#: Modules that define what a user can set, relative to the package, and where its environment variables are.
SETTINGS = {
    "vllm": ("config", "engine/arg_utils.py"),
    "sglang": ("srt/server_args.py", "srt/arg_groups/fields", "srt/configs/model_config.py"),
}
VARIABLES = {"vllm": "envs.py", "sglang": "srt/environ.py"}
#: Folders whose modules read others by their names, which stand in for NAME in the pattern: SGLang has many ways to.
READERS: dict[str, tuple[tuple[str, ...], str]] = {
    "vllm": ((".",), r"""(?:environ|getenv)\W[\w.]*\W*["'](NAME)["']"""),
    "sglang": (("srt", "kernels"), r"""["'](NAME)["']"""),
}
#: SGLang's server arguments are put together from classes that have this; and what it derives, which is no setting.
_NAMESPACE, _DERIVED = "_NS_PATH", "Derived("

#: Classes of a command line's arguments, whose fields fill those of the configurations.
ARGUMENT_CLASSES = ("EngineArgs", "AsyncEngineArgs")
#: How a field is described that a user cannot set.
_UNSETTABLE = ("ClassVar", "init=False")
#: Stands for a whole module that is imported by its name.
_MODULE = ast.Assign([ast.Name("module")], ast.Constant(...))

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Found:
    """Where a name is defined, and how."""

    module: str
    node: Definition


@dataclass
class Uses:
    """What our adapter takes from a framework."""

    names: set[tuple[str, str]] = field(default_factory=set)
    """Module and name of each import."""
    members: set[str] = field(default_factory=set)
    """Every attribute read, method defined and argument named: members of a class count as used by their name."""


class Version:
    """The source of one version.

    Raises:
        ValueError: there is no such package in the folder.
    """

    def __init__(self, folder: Path, package: str) -> None:
        places = [folder, *folder.glob("lib/python*/site-packages")]
        self.package = package
        self.root = next((place for place in places if (place / package).is_dir()), folder)
        if not (self.root / package).is_dir():
            raise ValueError(f"{folder} has no package {package!r}: name an environment, or a folder that holds it")
        self._modules: dict[str, dict[str, ast.stmt]] = {}

    def path(self, module: str) -> Path | None:
        """The file of a module, or None where there is none."""
        base = self.root / Path(*module.split("."))
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def statements(self, module: str) -> dict[str, ast.stmt]:
        """What defines or imports each name of a module; of several the last."""
        if module not in self._modules:
            path = self.path(module)
            tree = ast.parse(path.read_text()) if path else ast.Module([], [])
            self._modules[module] = found = {}
            for node in _flat(tree.body):
                if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                    found |= self.statements(self._absolute(module, node))
                found |= dict.fromkeys(_defined(node), node)
        return self._modules[module]

    def find(self, module: str, name: str) -> Found | None:
        """Where a name that is imported from a module is defined, through any number of re-exports."""
        for _ in range(10):
            node = self.statements(module).get(name)
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                name = next(item.name for item in node.names if name in (item.asname, item.name))
                if self.path(f"{source}.{name}"):  # a module of a package
                    return Found(f"{source}.{name}", _MODULE)
                module = source
            elif isinstance(node, Definition):
                return Found(module, node)
            elif self.path(f"{module}.{name}"):
                return Found(f"{module}.{name}", _MODULE)
            else:
                lazily = self._lazily(module, name)
                if lazily is None:
                    return None
                module, name = lazily
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.path(module)
        parts = module.split(".")
        above = node.level - (1 if path is not None and path.name == "__init__.py" else 0)
        return ".".join([*parts[: len(parts) - above], *(node.module.split(".") if node.module else [])])

    def _lazily(self, module: str, name: str) -> tuple[str, str] | None:
        """Of a package that imports by a table, as vLLM does: `"LLM": ".entrypoints.llm:LLM"`."""
        path = self.path(module)
        for node in ast.walk(ast.parse(path.read_text())) if path else ():
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if _constant(key) == name and isinstance(place := _constant(value), str) and ":" in place:
                        source, _, target = place.partition(":")
                        return (f"{module}{source}" if source.startswith(".") else source), target
        return None

    def members(self, found: Found) -> dict[str, Definition]:
        """Methods and fields of a class and of those of its bases that this package defines."""
        members: dict[str, Definition] = {}
        assert isinstance(found.node, ast.ClassDef)
        for base in reversed(found.node.bases):
            above = self.find(found.module, ast.unparse(base).partition("[")[0])
            if above is not None and isinstance(above.node, ast.ClassDef):
                members |= self.members(above)
        for node in _flat(found.node.body):
            members |= {name: node for name in _defined(node) if isinstance(node, Definition)}
        return members

    @cache  # noqa: B019 - one object a version, for one run
    def settings(self) -> dict[str, str]:
        """Each field of a configuration or of the server's arguments, with its type and default."""
        found = {}
        for part in SETTINGS[self.package]:
            place = self.root / self.package / part
            for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                for node in ast.parse(path.read_text()).body if path.is_file() else ():
                    if isinstance(node, ast.ClassDef):
                        found |= _fields(node)
        return found

    @cache  # noqa: B019 - one object a version, for one run
    def variables(self) -> set[str]:
        """The framework's environment variables: those of its list, and those that other modules read themselves."""
        prefix = f"{self.package.upper()}_"
        place, name = self.root / self.package / VARIABLES[self.package], rf"{prefix}\w*[A-Z0-9]"
        nodes = list(ast.walk(ast.parse(place.read_text())))
        words = [*map(_constant, nodes), *(node.id for node in nodes if isinstance(node, ast.Name))]
        names = {word for word in words if isinstance(word, str) and re.fullmatch(name, word)}
        folders, pattern = READERS[self.package]
        read = re.compile(pattern.replace("NAME", name))
        for path in {path for folder in folders for path in (self.root / self.package / folder).rglob("*.py")} - {
            place
        }:
            names |= set(read.findall(path.read_text(errors="ignore")))
        return names


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """The fields of a class, or where it has none what its objects are made of."""
    statements = list(_flat(node.body))
    fields = [item for item in statements if isinstance(item, ast.AnnAssign)]
    if any(_NAMESPACE in _defined(item) for item in statements):
        kept = [item for item in fields if _DERIVED not in ast.unparse(item.annotation)]
        return {f"ServerArgs.{ast.unparse(item.target)}": _described(item) for item in kept}
    if fields:
        return {f"{node.name}.{ast.unparse(item.target)}": _described(item) for item in fields}
    makers = [item.args for item in statements if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return {f"{node.name}.{item.arg}": _annotated(item) for maker in makers for item in maker.args[1:]}


def _annotated(item: ast.arg) -> str:
    return ast.unparse(item.annotation) if item.annotation else ""


def _constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of the branches in it."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                inner = getattr(node, part, [])
                yield from _flat([item for handler in inner for item in getattr(handler, "body", [])])
                yield from _flat([item for item in inner if isinstance(item, ast.stmt)])


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [item.asname or item.name for item in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _described(node: Definition) -> str:
    """A signature, the bases of a class, or the type and value of a field."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(ast.unparse(base) for base in node.bases)})"
    annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    return f"{annotation} = {ast.unparse(node.value)}" if node.value else annotation


def uses_of(folder: Path, package: str) -> Uses:
    """What the adapter in `folder` takes from `package`."""
    uses = Uses()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
                uses.names |= {(node.module or "", item.name) for item in node.names}
            elif isinstance(node, ast.Attribute):
                uses.members.add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                uses.members.add(node.name)
            elif isinstance(node, ast.keyword) and node.arg:
                uses.members.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                uses.members.add(node.value)  # by getattr
    return uses


def changed_names(uses: Uses, old: Version, new: Version) -> Iterator[str]:
    """One line for each imported name, and each used member of a class, that is not what it was."""
    for module, name in sorted(uses.names):
        before, after = old.find(module, name), new.find(module, name)
        title = f"{module}.{name}"
        if after is None:
            yield f"{'gone' if before else 'in neither'}: {title}"
            continue
        if before is None:
            yield f"new: {title}"
            continue
        if before.module != after.module:
            yield f"moved: {title}: from {before.module} to {after.module}"
        yield from _changed(title, _described(before.node), _described(after.node))
        if isinstance(before.node, ast.ClassDef) and isinstance(after.node, ast.ClassDef):
            yield from _changed_members(title, uses, old.members(before), new.members(after))


def _changed_members(
    title: str, uses: Uses, before: dict[str, Definition], after: dict[str, Definition]
) -> Iterator[str]:
    for name in sorted(uses.members & before.keys()):
        if name not in after:
            yield f"gone: {title}.{name}"
        else:
            yield from _changed(f"{title}.{name}", _described(before[name]), _described(after[name]))


def _changed(title: str, was: str, now: str) -> Iterator[str]:
    if was != now:
        yield f"changed: {title}: {was} is now {now}"


def changed_settings(old: dict[str, str], new: dict[str, str], uses: Uses) -> Iterator[str]:
    """One line for each field that is new, gone or different; one that our adapter reads is marked."""
    for name in sorted(old.keys() | new.keys()):
        used = " (read by our adapter)" if name.rpartition(".")[2] in uses.members else ""
        if name not in new:
            yield f"gone: {name}{used}"
        elif name not in old:
            yield f"new: {name}: {new[name]}"
        else:
            yield from _changed(f"{name}{used}", old[name], new[name])


def unlisted(
    settings: Mapping[str, str], variables: Collection[str], listed: Collection[str], arguments: Mapping[str, str]
) -> list[str]:
    """What a version lets a user set that a table does not list.

    Args:
        settings: see :meth:`Version.settings`; fields that only the framework fills in are left out.
        variables: see :meth:`Version.variables`.
        listed: the settings of the table.
        arguments: for a field of the arguments the setting that it fills, where that has another name.
    """
    names = {setting.rpartition(".")[2] for setting in listed}

    def is_listed(setting: str) -> bool:
        owner, _, name = setting.rpartition(".")
        if setting in listed or arguments.get(setting) in listed:
            return True
        return owner in ARGUMENT_CLASSES and setting not in arguments and name in names

    settable = [name for name, described in settings.items() if not any(word in described for word in _UNSETTABLE)]
    return sorted(name for name in [*settable, *variables] if not is_listed(name))


def unlisted_by_our_adapter(version: Version) -> list[str]:
    """:func:`unlisted` of a version and our adapter's table."""
    from atom_plugin.common.flags import listed

    flags = import_module(f"atom_plugin.{version.package}.flags")
    return unlisted(version.settings(), version.variables(), listed(flags.TABLE), getattr(flags, "ARGUMENTS", {}))


def main(arguments: list[str] | None = None) -> int:
    """Print the four lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=sorted(SETTINGS))
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args(arguments)
    try:
        old, new = Version(given.old, given.package), Version(given.new, given.package)
    except ValueError as error:
        parser.error(str(error))
    uses = uses_of(ADAPTERS / given.package, given.package)
    names = list(changed_names(uses, old, new))
    before, after = old.variables(), new.variables()
    lists = {
        f"names: {len(uses.names)} imported": names,
        f"settings: {len(old.settings())} and {len(new.settings())}": list(
            changed_settings(old.settings(), new.settings(), uses)
        ),
        f"variables: {len(before)} and {len(after)}": [
            *(f"gone: {name}" for name in sorted(before - after)),
            *(f"new: {name}" for name in sorted(after - before)),
        ],
    }
    lists = {f"{title}, {len(lines)} changes": lines for title, lines in lists.items()}
    lists |= {f"unlisted: {len(found)} in no row of our table": found for found in [unlisted_by_our_adapter(new)]}
    for title, lines in lists.items():
        print(title)
        for line in lines:
            print(f"  {line}")
    return int(any(line.startswith("gone") for line in names))


if __name__ == "__main__":
    sys.exit(main())
