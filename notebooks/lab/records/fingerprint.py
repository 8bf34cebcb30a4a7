"""What a recorded row depends on: a training function and every function, class and constant that it reaches.

The fingerprint follows names and ``module.attribute`` from the notebook into all of `lab`, by syntax tree: formatting,
comments, docstrings, annotations and the words of error messages are free, and so is moving a function to another file.
It stops at installed packages and at `ndlinear`, whose behaviour `canary.world` holds fast; only experiments that measure
time or memory follow the layer's code too. It also stops at the rooms named in `OUTSIDE`, which cannot change a number.

It is the fast first look: where it moved, the canary decides.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib
import inspect
import linecache
import pathlib
import symtable
import sys
import types
from collections import ChainMap
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from ..modes import LabError

OUTSIDE = (
    "lab.page",  # shows what was found
    "lab.records",  # keeps it
    "lab.tools",  # calls it
    "lab.data.files",  # fetches bytes; what is read from them has a checksum in each row
)
PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, range, slice)
NAMED = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    types.GenericAlias,
)
LAYER = "ndlinear"
FILES_OF_THE_LAYER = ("ndlinear_lora",)  # what stood in ndlinear.py when rows were recorded


class FingerprintError(LabError):
    """A training function reads something whose state cannot be told from its source."""


# ------------------------------------------------------------------------------------------------------- syntax trees
@functools.lru_cache(maxsize=256)
def _module_tree(file: str, lines: tuple[str, ...]) -> ast.Module:
    return ast.parse("".join(lines))


@functools.lru_cache(maxsize=256)
def _definitions(file: str, lines: tuple[str, ...]) -> list[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    return [node for node in ast.walk(_module_tree(file, lines)) if isinstance(node, kinds)]


def _nodes(file: str, kinds) -> list[ast.AST]:
    """The functions, lambdas or classes that a file, or a cell of a notebook, defines."""
    found = _definitions(file, tuple(linecache.getlines(file)))
    return [node for node in found if isinstance(node, kinds)]


def _first_line(node: ast.AST) -> int:
    """Where the compiler says that a definition begins: at its first decorator."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _function_trees(function: types.FunctionType) -> list[ast.AST]:
    """The definition of a function; for a lambda, all lambdas that begin in its line."""
    code = function.__code__
    if code.co_name == "<lambda>":
        found = [n for n in _nodes(code.co_filename, ast.Lambda) if n.lineno == code.co_firstlineno]
    else:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [
            node
            for node in _nodes(code.co_filename, kinds)
            if node.name == code.co_name and _first_line(node) == code.co_firstlineno
        ]
    if not found:
        raise FingerprintError(
            f"the source of {function.__qualname__} is not at hand ({code.co_filename}, line "
            f"{code.co_firstlineno}); define it in a cell or a file, not with exec"
        )
    return found


def _class_tree(cls: type) -> tuple[str, ast.AST] | None:
    """File and definition of a class, or None for one without methods that was typed into a notebook."""
    written = [f for f in vars(cls).values() if isinstance(f, types.FunctionType)]
    files = {f.__code__.co_filename for f in written if linecache.getlines(f.__code__.co_filename)}
    module = sys.modules.get(cls.__module__)
    if getattr(module, "__file__", None):
        files.add(module.__file__)
    for file in sorted(files):
        found = [node for node in _nodes(file, ast.ClassDef) if node.name == cls.__name__]
        if found:
            return file, found[-1]
    return None


class _Bare(ast.NodeTransformer):
    """Takes out of a tree what cannot change a number: docstrings, annotations, the words of errors."""

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_arg(self, node):
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node):
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Raise(self, node):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return ast.Raise(exc=raised, cause=None)

    def _function(self, node):
        node.returns = None
        node = self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _function


def bare(node: ast.AST) -> ast.AST:
    """A copy of a tree without what `_Bare` takes out."""
    if isinstance(node, ast.ClassDef):
        node.returns = None
    again = ast.parse(ast.unparse(node)).body[0]
    return ast.fix_missing_locations(_Bare().visit(again))


@functools.lru_cache(maxsize=4096)
def _bare_once(node: ast.AST) -> ast.AST:
    """`bare`, made once for each definition and only read."""
    return bare(node)


class _Numbered(ast.NodeTransformer):
    """Puts in place of names their numbers in the order of appearance, and of other definitions what they contain."""

    def __init__(self, meant: dict[str, str]):
        self.meant, self.order = meant, {}

    def _name(self, name: str) -> str:
        return self.meant.get(name) or f"_{self.order.setdefault(name, len(self.order))}"

    def visit_Name(self, node):
        return ast.Name(self._name(node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self._name(node.arg))

    def visit_Attribute(self, node):
        found = self.meant.get(_dotted(node))
        return ast.Name(found, node.ctx) if found else self.generic_visit(node)


def numbered(node: ast.AST, meant: dict[str, str]) -> ast.AST:
    """A copy of a definition that stays as it is when locals, or definitions in ``meant``, get other names."""
    return ast.fix_missing_locations(_Numbered(meant).visit(copy.deepcopy(node)))


@dataclass(frozen=True)
class Definition:
    """A function or class that a training function reaches: its file and tree, and names in it -> what they contain."""

    file: str
    tree: ast.AST
    meant: dict[str, str]


def _listed(node, names: dict[str, str]) -> object:
    """A syntax tree as nested lists, equal over formatting and Python versions.

    ``names``: dotted names of the lab, such as "stacked.fit", and the last word that stands for them: with the tree of what
    is meant beside it, nothing changes when a function moves.
    """
    if isinstance(node, list):
        return [_listed(n, names) for n in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    dotted = _dotted(node)
    if dotted in names:
        return ["lab", names[dotted]]
    skipped = ("kind", "type_comment", "type_params", "ctx", "lineno", "col_offset")
    fields = {k: v for k, v in ast.iter_fields(node) if v not in (None, []) and k not in skipped}
    return [type(node).__name__, {k: _listed(v, names) for k, v in fields.items()}]


@functools.lru_cache(maxsize=4096)
def _content_of(tree: ast.AST) -> str:
    """The text of a definition without its name, its locals numbered."""
    return "".join(ast.unparse(part) for part in _body(numbered(tree, {})))


def _body(tree: ast.AST) -> list[ast.AST]:
    body = getattr(tree, "body", tree)
    return body if isinstance(body, list) else [body]


def _dotted(node: ast.AST) -> str:
    """ "a.b.c" for a chain of attributes of a name, else nothing."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@functools.lru_cache(maxsize=4096)
def _outer_names(tree: ast.AST) -> frozenset[str]:
    """Names that a definition takes from outside, by the compiler's own rules of scope."""
    found: set[str] = set()
    top = symtable.symtable(ast.unparse(tree), "definition", "exec")

    def collect(table) -> None:
        for symbol in table.get_symbols():
            outside = symbol.is_global() or (table is top and not symbol.is_assigned())
            if symbol.is_referenced() and outside:
                found.add(symbol.get_name())
        for child in table.get_children():
            collect(child)

    collect(top)
    return frozenset(found)


# ------------------------------------------------------------------------------------------------------- what is reached
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _in_lab(module: str) -> bool:
    return module == "lab" or module.startswith("lab.")


class _Reached:
    """Everything that a training function reaches, each once: (what, name, content)."""

    def __init__(self, home: str, layer: bool):
        self.home, self.layer = home, layer
        self.entries: list[tuple[str, str, str]] = []
        self.places: dict[tuple[str, str], str] = {}  # (module, name) of what lies in the lab
        self.seen: dict[int, object] = {}
        self.definitions: list[Definition] = []
        self.atoms: set[str] = set()  # numbers, texts and arrays in constants

    def code(self) -> str:
        """A hash of all of it."""
        return _digest(repr(sorted(set(self.entries))))

    def shape(self) -> str:
        """A hash of the code alone: the same when a notebook runs small, with other constants."""
        code = sorted({entry[1:] for entry in self.entries if entry[0] == "code"})
        return _digest(repr(code))

    def in_lab(self) -> dict[str, str]:
        """What it reaches in the lab: "module:name" -> hash of its definition."""
        return {f"{module}:{name}": found for (module, name), found in sorted(self.places.items())}

    def numbers(self) -> set[str]:
        """All numbers in the code and the constants, with the texts and arrays that are constants; -1, 0 and 1 are free."""
        nodes = [n for d in self.definitions for n in ast.walk(_bare_once(d.tree))]
        values = [n.value for n in nodes if isinstance(n, ast.Constant)]
        found = {repr(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)}
        return (found | self.atoms) - {"0", "1", "-1", "0.0", "1.0"}

    def followed(self, module: str) -> bool:
        """Whether definitions of a module count: the notebook's, the lab's, and the layer's where it is what is measured."""
        if any(module == room or module.startswith(room + ".") for room in OUTSIDE):
            return False
        return module == self.home or _in_lab(module) or (self.layer and module == LAYER)

    def definition(self, thing) -> None:
        """Take down a function or class and follow the names in it."""
        if id(thing) in self.seen:
            return
        self.seen[id(thing)] = thing
        if isinstance(thing, type):
            found, scope = _class_tree(thing), self._class_scope(thing)
            if found is None:
                self._plain_class(thing)
                return
            file, trees = found[0], [found[1]]
        else:
            file, trees = thing.__code__.co_filename, _function_trees(thing)
            scope = self._function_scope(thing)
        content = []
        for tree in trees:
            meant: dict[str, str] = {}
            content.append(self._follow(_bare_once(tree), scope, thing.__qualname__, meant))
            self.definitions.append(Definition(file, tree, meant))
        text = repr(content)
        self.entries.append(("code", thing.__qualname__, text))
        if _in_lab(thing.__module__):
            self.places[thing.__module__, thing.__qualname__] = _digest(text)

    @staticmethod
    def _function_scope(function) -> ChainMap:
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        closure = {name: cell.cell_contents for name, cell in cells}
        return ChainMap(closure, function.__globals__)

    @staticmethod
    def _class_scope(cls: type) -> ChainMap:
        written = [f for f in vars(cls).values() if isinstance(f, types.FunctionType)]
        own = next((f.__globals__ for f in written if f.__module__ == cls.__module__), {})
        return ChainMap(own, vars(sys.modules.get(cls.__module__, types.ModuleType("none"))))

    def _plain_class(self, cls: type) -> None:
        """A class without source at hand: its bases, fields and values."""
        own = {k: v for k, v in vars(cls).items() if not k.startswith("__")}
        plain = {k: v for k, v in own.items() if isinstance(v, (*PLAIN, tuple, list, dict, set))}
        values = {k: self.value(v, cls.__qualname__) for k, v in plain.items()}
        fields = sorted(getattr(cls, "__annotations__", {}))
        bases = [self.value(base, cls.__qualname__) for base in cls.__bases__]
        content = repr([bases, fields, sorted(values.items())])
        self.entries.append(("class", cls.__qualname__, content))

    def _follow(self, tree: ast.AST, scope, reader: str, meant: dict[str, str]) -> object:
        """The listed tree of a definition, after everything that it names was taken down; ``meant`` is filled."""
        outer, names = _outer_names(tree), {}
        chains = {_dotted(n) for n in ast.walk(tree) if isinstance(n, (ast.Attribute, ast.Name))}
        for name in sorted(outer):
            if name not in scope or name.startswith("__"):  # a builtin, nothing yet, or a place
                continue
            value = scope[name]
            if not isinstance(value, types.ModuleType):
                self._named(name, value, reader)
                meant |= self._content(name, value)
            elif _in_lab(value.__name__) or (self.layer and value.__name__ == LAYER):
                for chain in sorted(c for c in chains if c.partition(".")[0] == name):
                    dotted, found = self._attribute(chain, value, reader)
                    last = dotted.rpartition(".")[2]  # "__file__" and the like do not count
                    if not isinstance(found, types.ModuleType) and not last.startswith("__"):
                        names[dotted] = last
                        self._named(last, found, reader)
                        meant |= self._content(dotted, found)
        return _listed(tree, names)

    def _content(self, name: str, thing) -> dict[str, str]:
        """A name of a definition that is followed -> what stands in it, without names."""
        thing = inspect.unwrap(thing) if isinstance(thing, types.FunctionType) else thing
        if not isinstance(thing, (types.FunctionType, type)) or not self.followed(thing.__module__):
            return {}
        if isinstance(thing, type):
            trees = [(_class_tree(thing) or (0, ast.Pass()))[1]]
        else:
            trees = _function_trees(thing)
        text = "".join(map(_content_of, trees))
        return {name: f"of_{_digest(text)[:8]}"}

    def _attribute(self, chain: str, module: types.ModuleType, reader: str):
        """What "module.attribute" or "package.module.attribute" names, and how much of the chain that takes."""
        first, *rest = chain.split(".")
        taken, value = first, module
        for part in rest:
            if not isinstance(value, types.ModuleType):
                break
            if not hasattr(value, part):
                raise FingerprintError(
                    f"{reader} reads {chain}, but {value.__name__} has no {part!r}"
                )
            value, taken = getattr(value, part), f"{taken}.{part}"
        return taken, value

    def _named(self, name: str, value, reader: str) -> None:
        """Take down what a global name stands for."""
        value = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
        if isinstance(value, (types.FunctionType, type)) and self.followed(value.__module__):
            self.definition(value)
            if value.__name__ != name:  # imported or bound under another name
                self.entries.append(("name", name, value.__qualname__))
            return
        text = self.value(value, f"{reader} reads {name}, which")
        self.entries.append(("value", name, text))

    def value(self, value, reader: str) -> str:
        """The content of a constant as text; what has no content that can be told raises."""
        if hasattr(type(value), "__fingerprint__"):
            return self.value(value.__fingerprint__(), reader)
        if isinstance(value, PLAIN):
            self.atoms.add(repr(value)[:40])
            return repr(value)
        if isinstance(value, (list, tuple)):
            kind = type(value)
            head = "" if kind in (list, tuple) else self.value(kind, reader)
            return f"{head}[{', '.join(self.value(v, reader) for v in value)}]"
        if isinstance(value, (set, frozenset)):
            return f"set[{', '.join(sorted(self.value(v, reader) for v in value))}]"
        if isinstance(value, (dict, types.MappingProxyType)):
            items = [f"{self.value(k, reader)}: {self.value(v, reader)}" for k, v in value.items()]
            return f"dict[{', '.join(items)}]"
        if isinstance(value, functools.partial):
            return f"partial{self.value([value.func, value.args, value.keywords], reader)}"
        if callable(value) or isinstance(value, types.ModuleType):
            return self._callable(value, reader)
        return self._object(value, reader)

    def _callable(self, value, reader: str) -> str:
        if isinstance(value, types.ModuleType):
            if not _in_lab(value.__name__):
                return f"module {value.__name__}"
            raise FingerprintError(
                f"{reader} is the module {value.__name__} as a value: read module.attribute instead"
            )
        if isinstance(value, types.MethodType):
            return self.value([value.__func__, value.__self__], reader)
        wrapped = inspect.unwrap(value)
        module = getattr(wrapped, "__module__", None) or type(wrapped).__module__
        if isinstance(wrapped, (types.FunctionType, type)) and self.followed(module):
            self.definition(wrapped)
            return f"lab {wrapped.__qualname__}"
        if hasattr(wrapped, "__qualname__") or hasattr(wrapped, "__name__"):
            name = getattr(wrapped, "__qualname__", None) or wrapped.__name__
            module = LAYER if module in FILES_OF_THE_LAYER else module
            return f"{module.partition('.')[0]} {name}"
        return self._object(value, reader)

    def _object(self, value, reader: str) -> str:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.ascontiguousarray(value)
            content = repr(array.tolist()) if array.dtype == object else array.tobytes()
            raw = content.encode() if isinstance(content, str) else content
            text = f"array {array.dtype} {array.shape} {hashlib.sha256(raw).hexdigest()[:16]}"
            self.atoms.add(text)
            return text
        if isinstance(value, (pd.DataFrame, pd.Series, pd.Index)):
            text = repr(value.to_numpy().tolist()) + repr(list(getattr(value, "columns", [])))
            return f"table {_digest(text)}"
        if isinstance(value, NAMED):
            return repr(value)
        if isinstance(value, types.SimpleNamespace):
            return self.value(vars(value), reader)
        if isinstance(value, pathlib.PurePath):
            return "path"  # where things lie differs from machine to machine
        cls = type(value)
        if _in_lab(cls.__module__) and not self.followed(cls.__module__):
            return f"outside {cls.__qualname__}"
        if isinstance(value, torch.nn.Module):
            state = {k: self.value(v, reader) for k, v in value.state_dict().items()}
            return f"{self.value(cls, reader)} {value!r} {state}"
        if self.followed(cls.__module__) and hasattr(value, "__dict__"):
            state = {k: self.value(v, reader) for k, v in sorted(vars(value).items())}
            return f"{self.value(cls, reader)} {state}"
        raise FingerprintError(
            f"{reader} is a {cls.__module__}.{cls.__qualname__}: its state is not in the source, so a record cannot depend on it. "
            "Make it inside the training function, or put what it depends on into the configuration"
        )


def closure(run, also=(), *, layer: bool = False) -> _Reached:
    """Everything that a training function reaches."""
    run = inspect.unwrap(run)
    reached = _Reached(run.__module__, layer)
    reached.definition(run)
    for thing in also:
        reached.entries.append(("also", "", reached.value(thing, run.__qualname__)))
    return reached


def code_hash(run, also=(), *, layer: bool = False) -> str:
    """Fingerprint of a training function: 16 hexadecimal digits.

    Args:
        run: a function of a notebook or file.
        also: further things that count, such as the sources of the data sets.
        layer: follow `ndlinear` as well; for experiments that measure what its code costs.

    Raises:
        FingerprintError: it reads a value that has no content that can be told, such as a random generator.
    """
    return closure(run, also, layer=layer).code()


def here(places) -> dict[str, str]:
    """The same names, as `in_lab` gives them, in this process: -> hash of the definition, or "absent"."""
    found = {}
    for place in places:
        module, _, name = place.partition(":")
        try:
            thing = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            found[place] = "absent"
            continue
        own = _Reached(module, False)
        own.definition(inspect.unwrap(thing))
        found[place] = own.places[module, name]
    return found
