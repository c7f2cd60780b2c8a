"""Where each key of a TOML text stands, by line. The standard parser keeps no positions.

The scanner presumes text that `tomllib` has accepted: it finds places and judges nothing.
"""

import tomllib
from collections.abc import Mapping

Loc = tuple[str | int, ...]  # keys and indices, from the outermost table in


def key_lines(text: str) -> Mapping[Loc, int]:
    """Line (from 1) of every table, key and array element. ("fleet", "devices", 0, "kind") is the first device's kind."""
    return _Scanner(text).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Loc, int] = {}
        self.counts: dict[Loc, int] = {}  # elements of each array of tables

    def run(self) -> Mapping[Loc, int]:
        table: Loc = ()
        while True:
            self._skip(newlines=True)
            if self.at >= len(self.text):
                return self.lines
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._assignment(table)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _skip(self, *, newlines: bool) -> None:
        """Pass blanks and comments."""
        blanks = " \t\r\n" if newlines else " \t"
        while self.at < len(self.text):
            if self.text[self.at] in blanks:
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _header(self) -> Loc:
        line = self._line()
        double = self.text.startswith("[[", self.at)
        self.at += 2 if double else 1
        keys = self._keys()
        self.at += 2 if double else 1
        table = (*self._open(keys[:-1], line), keys[-1])
        self.lines.setdefault(table, line)
        if double:
            n = self.counts.get(table, 0)
            self.counts[table] = n + 1
            table += (n,)
            self.lines[table] = line
        return table

    def _open(self, keys: tuple[str, ...], line: int, start: Loc = ()) -> Loc:
        """The path of nested tables; an array of tables means its newest element."""
        path = start
        for key in keys:
            path += (key,)
            self.lines.setdefault(path, line)
            if path in self.counts:
                path += (self.counts[path] - 1,)
        return path

    def _keys(self) -> tuple[str, ...]:
        """A dotted key."""
        keys = []
        while True:
            self._skip(newlines=False)
            start = self.at
            if self.text[self.at] in "\"'":
                self._string()
                keys.append(str(tomllib.loads(f"k = {self.text[start : self.at]}")["k"]))
            else:
                while self.text[self.at] not in " \t.=]":
                    self.at += 1
                keys.append(self.text[start : self.at])
            self._skip(newlines=False)
            if self.text[self.at] != ".":
                return tuple(keys)
            self.at += 1

    def _assignment(self, table: Loc) -> None:
        line = self._line()
        keys = self._keys()
        path = (*self._open(keys[:-1], line, table), keys[-1])
        self.lines[path] = line
        self.at += 1  # "="
        self._skip(newlines=False)
        self._value(path)

    def _value(self, path: Loc) -> None:
        match self.text[self.at]:
            case '"' | "'":
                self._string()
            case "[":
                self._array(path)
            case "{":
                self._inline(path)
            case _:
                while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                    self.at += 1

    def _string(self) -> None:
        quote = self.text[self.at]
        mark = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(mark)
        while not self.text.startswith(mark, self.at):
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        self.at += len(mark)
        while len(mark) == 3 and self.text.startswith(quote, self.at):  # up to two quotes may end the text itself
            self.at += 1

    def _array(self, path: Loc) -> None:
        self.at += 1
        n = 0
        while True:
            self._skip(newlines=True)
            if self.text[self.at] == "]":
                break
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self.lines[(*path, n)] = self._line()
            self._value((*path, n))
            n += 1
        self.at += 1

    def _inline(self, path: Loc) -> None:
        self.at += 1
        while True:
            self._skip(newlines=True)
            if self.text[self.at] == "}":
                break
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self._assignment(path)
        self.at += 1
