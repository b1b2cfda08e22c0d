"""The command that a launch script runs, with the script's own variables filled in where their values are plain."""

import re
import shlex
from dataclasses import dataclass, field
from itertools import dropwhile, pairwise
from pathlib import Path

from megatron_rc.doctor.host.launcher import read_launcher

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}$]*))?\})")
_OPENING = ("if", "for", "while", "until", "case", "select", "{")
_CLOSING = ("fi", "done", "esac", "}")
_EXPORTING = ("export", "declare", "local", "readonly", "-x")
_HIDDEN = "$(...)"
_OUTSIDE = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?:^|(?<=[ \t]))\#[^\n]*""", re.MULTILINE | re.DOTALL)
"""A quoted text, or a comment outside of one."""


@dataclass
class Script:
    """What is known after the commands of a script: its variables, and the longest command that starts a program."""

    files: list[Path]
    """The script and the files that it is sourcing now, innermost last."""
    words: list[str] = field(default_factory=list)
    """The command."""
    maybe: list[str] = field(default_factory=list)
    """Words that the command has as well if a branch with an unknown condition runs."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Words by variable; a scalar has one."""
    candidates: dict[str, list[str]] = field(default_factory=dict)
    """Words that a variable may hold, because a branch with an unknown condition sets it."""
    branches: list[bool | None] = field(default_factory=list)
    """Whether each open branch runs; None if that is unknown."""
    texts: list[str] = field(default_factory=list)
    """Those of all files read, and a word for each that was not found."""

    def may_have(self, array: str) -> bool:
        """Whether a file that is not here, or a command, may fill an array; none is inherited from outside."""
        others = re.compile(rf"(?m)\b{array}\b(?!\[)|^\s*eval\s")
        return _HIDDEN in self.texts or any(others.search(text) for text in self.texts)

    def value(self, name: str) -> str | None:
        """The value of a plain variable; None if it has none or a branch decides it."""
        words = self.variables.get(name)
        return words[0] if words is not None and len(words) == 1 and name not in self.candidates else None


def read_script(path: Path) -> Script:
    """The command in a launch script or a launcher in Python, or all words of a file that starts no program.

    Raises ValueError for an open quote, and for a launcher that is not Python.
    """
    # a folder whose name decides nothing
    script = Script([path.resolve()], variables={"HOME": ["~"]}, texts=[path.read_text(encoding="utf-8")])
    if path.suffix == ".py" and (found := read_launcher(path)):
        script.words, script.maybe = found
        return script
    commands = _commands(path)
    _run(script, commands)
    if not script.words:
        script.words = [word for command, _ in commands for word in command]
    return script


def program_of(words: list[str] | tuple[str, ...]) -> int:
    """The index after the word that names the program: a file of Python, or the module after -m; 0 where none does."""
    named = (word.endswith(".py") or before == "-m" for before, word in pairwise(("", *words)))
    return next((index for index, names in enumerate(named, 1) if names), 0)


def _run(script: Script, commands: list[tuple[list[str], bool]]) -> None:
    for command, depends in commands:
        words = [*dropwhile(("then", "do", "!").__contains__, command)]
        first = words[0] if words else ""
        if first in _CLOSING:
            del script.branches[-1:]
        elif first in _OPENING:
            script.branches.append(_holds(script, words[1:]) if first == "if" and not depends else None)
        elif first in ("else", "elif"):
            _turn(script, words)
        elif words and False not in script.branches:
            _execute(script, words, depends or None in script.branches)


def _turn(script: Script, words: list[str]) -> None:
    before = script.branches.pop() if script.branches else None
    otherwise = None if before is None else not before
    if words[0] == "elif" and otherwise:
        otherwise = _holds(script, words[1:])
    script.branches.append(otherwise)
    if words[0] == "else" and len(words) > 1 and otherwise is not False:
        _execute(script, words[1:], otherwise is None)


def _execute(script: Script, words: list[str], doubtful: bool) -> None:
    if words[0] in ("source", ".") and len(words) > 1:
        # the words of $(dirname FILE)/common.sh are $(...) and /common.sh
        _source(script, "".join(words[1:3]) if words[1] == _HIDDEN else words[1])
        return
    if program_of(words) and len(words) > 1:
        expanded, maybe = _expand(script, words)
        if len(expanded) > len(script.words):
            script.words, script.maybe = expanded, maybe
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            _assign(script, found, doubtful)
        elif word not in _EXPORTING:
            break


def _assign(script: Script, found: re.Match[str], doubtful: bool) -> None:
    name, plus, text = found.groups()
    given = text[1:].split("\0")[:-1] if text.startswith("\1") else [text]
    words, maybe = _expand(script, given, split=text.startswith("\1"))
    if any("$(" in word or "`" in word for word in words) and not text.startswith("\1"):
        # a command computes it
        script.variables.pop(name, None)
    elif doubtful:
        script.candidates.setdefault(name, []).extend([*words, *maybe])
    else:
        if not plus:
            script.candidates.pop(name, None)
        script.variables[name] = (script.variables.get(name, []) if plus else []) + words
        if maybe:
            script.candidates.setdefault(name, []).extend(maybe)


def _expand(script: Script, words: list[str], split: bool = True) -> tuple[list[str], list[str]]:
    """The words with known variables filled in, and the words that may appear next to them.

    The value of a variable without quotes is split into words, except in an assignment. The script has no arguments.
    """
    expanded: list[str] = []
    maybe: list[str] = []
    for word in words:
        array = _ARRAY.fullmatch(word)
        if array and (array[1] in script.variables or array[1] in script.candidates):
            expanded += script.variables.get(array[1], [])
            maybe += script.candidates.get(array[1], [])
        elif word not in ("$@", "$*") and not (array and not script.may_have(array[1])):
            filled = _fill(script, word)
            expanded += filled.split() if split and re.fullmatch(r"\$\w+|\$\{\w+\}", word) else [filled]
    return expanded, maybe


def _fill(script: Script, text: str) -> str:
    """A text with its plain variables filled in, innermost first."""
    # five levels of nesting: more are rare, and a variable may contain itself
    for _ in range(5):
        filled = _VARIABLE.sub(lambda found: _value(script, found), text)
        if filled == text:
            break
        text = filled
    return text


def _value(script: Script, found: re.Match[str]) -> str:
    value = script.value(found[1] or found[2])
    if value is None or (value == "" and found[3] is not None):
        doubtful = (found[1] or found[2]) in script.candidates
        return found[0] if found[3] is None or doubtful else found[3]
    # a value that contains its own name would be filled in forever
    return value if found[0] not in value else found[0]


def _holds(script: Script, condition: list[str]) -> bool | None:
    """Whether the test of an if is true; None where that is not known."""
    if not condition or condition[0] not in ("[", "[[") or condition[-1] not in ("]", "]]"):
        return None
    words = [_fill(script, word) for word in condition[1:-1]]
    if any("$" in word for word in words):
        return None
    match words:
        case [left, "=" | "==" | "!=" as sign, right]:
            return (left == right) == (sign != "!=")
        case ["-n" | "-z" as sign, text]:
            return bool(text) == (sign == "-n")
    return None


def _source(script: Script, word: str) -> None:
    """Run a sourced file; a folder that a command computes is that of the file that sources, or of the script.

    A file does not source itself: then a folder that is not known held another file of its name.
    """
    path = re.sub(r"^.*[})]/", "", _fill(script, word))
    found = ((file.parent / path).resolve() for file in reversed(script.files))
    file = next((file for file in found if file.is_file() and file not in script.files), None)
    if file is not None and "$" not in path:
        script.files.append(file)
        script.texts.append(file.read_text(encoding="utf-8"))
        _run(script, _commands(file))
        script.files.pop()
    else:
        script.texts.append(_HIDDEN)


def _commands(path: Path) -> list[tuple[list[str], bool]]:
    """The simple commands of a file, each with whether && or || joins it to another.

    The value of an array is one word: NAME= and a mark, then its words, each with a zero byte after it.
    """
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    text = _OUTSIDE.sub(lambda found: "" if found[0].startswith("#") else found[0], text) + "\n"
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise ValueError(f"{path} cannot be split into words: {error}") from None
    commands: list[tuple[list[str], bool]] = []
    words: list[str] = []
    depth, is_array, joined = 0, False, False
    for token in tokens:
        if not token or token.strip(";&|()\n"):
            if not depth:
                words.append(token)
            elif is_array and depth == 1:
                words[-1] += f"{token}\0"
            continue
        for sign in token:
            if sign == "(" and (depth or (words and words[-1].endswith(("=", "$")))):
                if not depth:
                    is_array = words[-1].endswith("=")
                    words[-1] += "\1" if is_array else "(...)"
                elif is_array and depth == 1 and words[-1].endswith("$\0"):
                    words[-1] = f"{words[-1][:-2]}{_HIDDEN}\0"
                depth += 1
            elif sign == ")" and depth:
                depth -= 1
            elif not depth:
                joins = token in ("&&", "||")
                if words:
                    commands.append((words, joined or joins))
                    words, joined = [], joins
                elif sign == "\n" or sign == ";":
                    joined = False
    return commands
