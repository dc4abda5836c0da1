"""Reading the text of a compiled program."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLS = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    opcode: str
    type: str
    calls: tuple[str, ...]
    text: str

    @property
    def size(self) -> int:
        """Elements of the (largest) result."""
        shapes = (shape for _, shape in _ARRAY.findall(self.type))
        return max((math.prod(int(n) for n in s.split(",") if n) for s in shapes), default=0)


class Program:
    """The computations of a compiled program, by name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[2]] = []
                if header[1]:
                    self.entry = header[2]
            elif found := _INSTRUCTION.match(line):
                current.append(Instruction(found[2], found[1], _callees(line), line.strip()))
        assert self.computations[self.entry], "not a program that this can read"

    def reachable(self, name: str | None = None) -> Iterator[Instruction]:
        """All instructions that a computation runs, once for each place it is called from."""
        for instruction in self.computations[name or self.entry]:
            yield instruction
            for callee in instruction.calls:
                yield from self.reachable(callee)

    def top_level(self) -> Iterator[Instruction]:
        """Instructions whose results are held in memory: those outside of fusions."""
        seen = [self.entry]
        for name in seen:
            for instruction in self.computations[name]:
                yield instruction
                if instruction.opcode in ("while", "conditional", "call"):
                    seen += [callee for callee in instruction.calls if callee not in seen]

    def all(self) -> Iterator[Instruction]:
        """Every instruction of the text, once."""
        for instructions in self.computations.values():
            yield from instructions

    def count(self, opcode: str, name: str | None = None) -> int:
        return sum(i.opcode == opcode for i in self.reachable(name))

    def branches(self, opcode: str) -> list[list[int]]:
        """Counts in the branches of each conditional that has any, in ascending order."""
        conditionals = [i for i in self.reachable() if i.opcode == "conditional"]
        counts = [sorted(self.count(opcode, name) for name in i.calls) for i in conditionals]
        return [found for found in counts if any(found)]


def _callees(line: str) -> tuple[str, ...]:
    names: list[str] = []
    for one, several in _CALLS.findall(line):
        names += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
    return tuple(names)
