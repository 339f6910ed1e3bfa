"""Reads a Dockerfile into stages of instructions, as far as this repository's needs it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"
DOCKERIGNORE = ROOT / ".dockerignore"


@dataclass(frozen=True)
class Instruction:
    """One instruction, continuation lines joined.

    Attributes:
        name: in capitals.
        text: what follows the name.
        line: number of its first line.
    """

    name: str
    text: str
    line: int

    @property
    def command(self) -> list[str]:
        """Words of an exec form; raises ValueError when it is a shell form."""
        words: list[str] = json.loads(self.text)
        return words

    @property
    def words(self) -> list[str]:
        """Words as a shell splits them, without options such as --from."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]

    @property
    def options(self) -> dict[str, str]:
        """Options before the first other word: `--from=build` is {"from": "build"}."""
        found: dict[str, str] = {}
        for word in self.text.split():
            if not word.startswith("--"):
                break
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value
        return found


@dataclass
class Stage:
    """Instructions from one FROM to the next.

    Attributes:
        base: image or stage it starts from, variables not replaced.
        name: what follows AS, "" without.
        instructions: without FROM.
    """

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        """The instructions of one kind."""
        return [item for item in self.instructions if item.name == name]

    def one(self, name: str) -> Instruction:
        """The only instruction of a kind."""
        found = self.all(name)
        if len(found) != 1:
            raise ValueError(f"{len(found)} instructions {name} in the stage from {self.base}")
        return found[0]


def instructions(text: str) -> list[Instruction]:
    """All instructions of a file, comments left out."""
    found: list[Instruction] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        if not pending:
            start = number
        pending += line.strip().removesuffix("\\")
        if not line.rstrip().endswith("\\"):
            name, _, rest = pending.partition(" ")
            found.append(Instruction(name.upper(), rest.strip(), start))
            pending = ""
    return found


def stages(text: str) -> list[Stage]:
    """The stages of a file; what stands before the first FROM is left out."""
    found: list[Stage] = []
    for item in instructions(text):
        if item.name == "FROM":
            match = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", item.text, re.IGNORECASE)
            if match is None:
                raise ValueError(f"line {item.line}: cannot read FROM {item.text}")
            found.append(Stage(match[1], match[2] or ""))
        elif found:
            found[-1].instructions.append(item)
    return found
