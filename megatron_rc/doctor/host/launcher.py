"""The command that a launcher in Python starts by ``execute_train(train_args=...)``, as those of miles do.

The file is read and never run. Strings and plain values are followed from the fields of the dataclass that it takes,
at their defaults, through the function that calls execute_train. What a call computes is a word such as
${args_run_id}; what stands in a branch whose condition is not known are words that the command may have.
"""

import ast
import operator
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_UNKNOWN = object()
_OPERATIONS: dict[type, Any] = {
    ast.Mult: operator.mul, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many, ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}  # fmt: skip


class Text(NamedTuple):
    """A string that is put together."""

    parts: tuple[tuple[str, bool], ...]
    """Pieces, and whether each may be missing."""

    def words(self, doubtful: bool) -> list[str]:
        """Those that are sure, or those that may be missing."""
        return shlex.split("".join(text if maybe is doubtful else " " for text, maybe in self.parts))


def read_launcher(path: Path) -> tuple[list[str], list[str]] | None:
    """The words of a launcher's command, and those that it has as well if a branch with an unknown condition runs.

    None for a file that starts nothing by execute_train. Raises ValueError where it is not Python, or an argument has
    an open quote.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        starting = [node for node in functions if any(map(_starts, ast.walk(node)))]
        if not starting:
            return None
        reader = _Reader(path.parent / "models")
        reader.run(node for node in tree.body if isinstance(node, ast.Assign))
        taken = {ast.unparse(each.annotation) for each in starting[0].args.args if each.annotation}
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in taken):
            reader.fields(cls)
        reader.run(starting[0].body)
        return reader.command
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a launcher: {error}") from None


def _starts(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].startswith("execute_train")


class _Reader:
    """The values of names and of the fields of dataclasses, as far as they are plain."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._names: dict[str, Any] = {}
        self._fields: dict[str, Any] = {}
        self._doubtful = False
        self.command: tuple[list[str], list[str]] | None = None

    def fields(self, cls: ast.ClassDef) -> None:
        """The defaults of a dataclass, and what its __post_init__ sets."""
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self._fields[node.target.id] = self._value(node.value)
            elif isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
                self.run(node.body)

    def run(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Assign(targets=[to], value=value) | ast.AnnAssign(target=to, value=ast.expr() as value):
                    self._assign(to, self._value(value))
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                    added = ((text, maybe or self._doubtful) for text, maybe in _text(self._value(value), value).parts)
                    self._names[name] = Text((*_text(self._names.get(name, ""), node.target).parts, *added))
                case ast.If(test=test, body=then, orelse=otherwise):
                    self._branch(self._truth(test), then, otherwise)
                case ast.Match(subject=subject, cases=cases):
                    self._match(self._value(subject), cases)
                case ast.For(body=inner) | ast.While(body=inner):
                    self._branch(None, inner, [])
                case ast.With(body=inner) | ast.Try(body=inner):
                    self.run(inner)
                case ast.Return(value=ast.expr() as value):
                    self._names["return"] = self._value(value)
                case ast.Expr(value=ast.Call() as call) if _starts(call):
                    self._start(call)

    def _start(self, call: ast.Call) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        arguments = given.get("train_args", [*call.args, ast.Constant("")][0])
        text, nothing = _text(self._value(arguments), arguments), ast.Constant(None)
        program, model = (self._value(given.get(name, nothing)) for name in ("train_script", "megatron_model_type"))
        command = ["python", program if isinstance(program, str) else "train.py", *text.words(doubtful=False)]
        if model is not None:
            command += self._flags_of(model)
        self.command = command, text.words(doubtful=True)

    def _flags_of(self, model: Any) -> list[str]:
        """What model_args returns in the file of a model; ${MODEL_ARGS} where that is not known."""
        reader, file = _Reader(self._models), self._models / f"{model}.py"
        if isinstance(model, str) and file.is_file():
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name == "model_args":
                    reader.run(node.body)
        return _text(reader._names.get("return", _UNKNOWN), ast.Name("MODEL_ARGS")).words(doubtful=False)

    def _assign(self, target: ast.expr, value: Any) -> None:
        name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
        known = self._fields if isinstance(target, ast.Attribute) else self._names
        known[name] = _either(known.get(name), value) if self._doubtful else value

    def _branch(self, holds: bool | None, then: list[ast.stmt], otherwise: list[ast.stmt]) -> None:
        before, self._doubtful = self._doubtful, self._doubtful or holds is None
        for body, runs in ((then, holds is not False), (otherwise, not holds)):
            if runs:
                self.run(body)
        self._doubtful = before

    def _match(self, subject: Any, cases: list[ast.match_case]) -> None:
        for case in cases:
            holds: bool | None = None
            match case.pattern:
                case ast.MatchAs(pattern=None) if subject is not _UNKNOWN and not case.guard:
                    holds = True
                case ast.MatchValue(value=wanted) if subject is not _UNKNOWN and not case.guard:
                    holds = self._value(wanted) == subject
            self._branch(holds, case.body, [])
            if holds:
                return

    def _truth(self, node: ast.expr) -> bool | None:
        value = self._value(node)
        return None if value is _UNKNOWN or isinstance(value, Text) else bool(value)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._names.get(name, _UNKNOWN)
            case ast.Attribute(value=ast.Name(), attr=name):
                return self._fields.get(name, _UNKNOWN)
            case ast.Call(func=function) if ast.unparse(function).endswith("get_default_wandb_args"):
                return ""  # flags of a dashboard alone
            case ast.JoinedStr(values=values):
                return Text(tuple(part for each in values for part in _text(self._value(each), each).parts))
            case ast.FormattedValue(value=inner):
                return _text(self._value(inner), inner)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                found = [self._value(item) for item in items]
                return _UNKNOWN if _UNKNOWN in found else found
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                sides = self._value(left), self._value(right)
                if all(isinstance(side, int | float) for side in sides):
                    return sides[0] + sides[1]
                return Text(_text(sides[0], left).parts + _text(sides[1], right).parts)
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                return _computed(op, self._value(left), self._value(right))
            case ast.BoolOp(op=op, values=values):
                found = [self._truth(value) for value in values]
                decides = isinstance(op, ast.Or)
                return decides if decides in found else _UNKNOWN if None in found else not decides
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                holds = self._truth(inner)
                return _UNKNOWN if holds is None else not holds
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                holds = self._truth(test)
                if holds is None:
                    return _either(self._value(then), self._value(otherwise))
                return self._value(then if holds else otherwise)
        return _UNKNOWN


def _either(*values: Any) -> Any:
    """One of the values: the flags in them may be missing, and all else is not known."""
    texts = [_text(each, ast.Constant(None)) for each in values if isinstance(each, str | Text)]
    parts = tuple((text, True) for each in texts for text, _ in each.parts)
    return Text(parts) if any("--" in text for text, _ in parts) else _UNKNOWN


def _computed(op: ast.AST, left: Any, right: Any) -> Any:
    """The value of an operation on two plain values; no text is repeated, which could fill the memory."""
    sides = (left, right)
    plain = type(op) in _OPERATIONS and not any(side is _UNKNOWN or isinstance(side, Text) for side in sides)
    if not plain or (isinstance(op, ast.Mult) and not all(isinstance(side, int | float) for side in sides)):
        return _UNKNOWN
    try:
        return _OPERATIONS[type(op)](left, right)
    except (TypeError, ZeroDivisionError):
        return _UNKNOWN


def _text(value: Any, node: ast.expr) -> Text:
    """A value within a string; a word such as ${args_run_id} where it is not known."""
    if isinstance(value, Text):
        return value
    word = f"${{{re.sub(r'[^A-Za-z0-9]+', '_', ast.unparse(node)).strip('_')}}}" if value is _UNKNOWN else str(value)
    return Text(((word, False),))
