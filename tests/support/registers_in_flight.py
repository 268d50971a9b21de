"""Find registers that a kernel for Hopper writes while its tensor cores may still read them.

    assert not written_in_flight(kernel.sass)

`wgmma` reads its first operand from registers after the instruction has been issued, until a wait for its group. The compiler
keeps such registers only up to the next wait of any kind. Where that one lets groups run on, as `warpgroup_mma_wait(1, …)`
does, numbers of the next operand may be written over those of this one, and the sums are wrong on a GPU now and then. Neither
an emulator nor the interpreter can show that. So this module follows the machine code along its branches.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?PT?\w*)\s+)?(\w[\w.]*)(.*?);")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_PRODUCT = re.compile(r" R\d+, R(\d+),")
_MOST_GROUPS = 8
_WIDTHS = {".64": 2, ".128": 4, ".x2": 2, ".x4": 4, ".M88.2": 2, ".M88.4": 4, ".MT88.2": 2, ".MT88.4": 4, ".WIDE": 2}
_WITHOUT_RESULT = ("ST", "RED", "BAR", "BRA", "BRX", "SYNCS", "UTMA", "UBLK", "HGMMA", "QGMMA", "IGMMA")
_JUMPS = ("BRA", "BRX", "BSYNC", "EXIT")

Groups = tuple[frozenset[int], ...]


class _Instruction(NamedTuple):
    """guard: the predicate, "" if there is none; text: the operands; targets: labels"""

    guard: str
    opcode: str
    text: str
    targets: list[str]


class _State(NamedTuple):
    """The registers of products that may still run: of the group that is open, and of the groups that are closed, in order."""

    open: frozenset[int] = frozenset()
    closed: Groups = ()

    @property
    def busy(self) -> frozenset[int]:
        return self.open.union(*self.closed)


def written_in_flight(sass: str) -> list[str]:
    """The instructions that may write a register which a product may still read, once each, in the order of the code."""
    code, labels = _parse(sass)
    found = set[int]()
    seen = set[tuple[int, _State]]()
    waiting = [(0, _State())]
    while waiting:
        at, state = waiting.pop()
        while at < len(code) and (at, state) not in seen:
            seen.add((at, state))
            instruction = code[at]
            if state.busy & _written(instruction):
                found.add(at)
            state = _after(state, instruction)
            if instruction.opcode.startswith(_JUMPS):
                waiting += [(labels[name], state) for name in instruction.targets]
                if not instruction.guard and "DIV" not in instruction.opcode:
                    break
            at += 1
    return [f"{code[at].opcode}{code[at].text}".strip() for at in sorted(found)]


def _parse(sass: str) -> tuple[list[_Instruction], dict[str, int]]:
    code = list[_Instruction]()
    labels = dict[str, int]()
    meeting = dict[str, list[str]]()  # where threads meet that part at a `BSSY`: it has a register, which `BSYNC` names
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            guard, opcode, operands = found.groups()
            targets = re.findall(r"\.L_\w+", line)
            barrier = operands.partition(",")[0].strip()
            if opcode == "BSSY":
                meeting[barrier] = targets
            elif opcode == "BSYNC":
                targets = meeting[barrier]
            code.append(_Instruction(guard or "", opcode, operands, targets))
    return code, labels


def _after(state: _State, instruction: _Instruction) -> _State:
    """What may still run after an instruction."""
    if "GMMA" in instruction.opcode:
        operand = _PRODUCT.match(instruction.text)
        registers = range(int(operand[1]), int(operand[1]) + 4) if operand else ()
        state = state._replace(open=state.open.union(registers))
        if "gsb0" in instruction.text:
            state = _State(frozenset(), (*state.closed, state.open)[-_MOST_GROUPS:])
    elif waited := re.search(r"DEPBAR\.LE gsb0, 0x(\w+)", instruction.opcode + instruction.text):
        left = int(waited[1], 16)
        state = _State(state.open, state.closed[len(state.closed) - min(left, len(state.closed)) :])
    return state


def _written(instruction: _Instruction) -> set[int]:
    """The registers in which an instruction has its result. Products write accumulators, for which the compiler waits."""
    result = re.match(r" (?:U?P\w+, )?R(\d+)\b", instruction.text)
    if result is None or instruction.opcode.startswith(_WITHOUT_RESULT):
        return set()
    width = max((width for suffix, width in _WIDTHS.items() if suffix in instruction.opcode), default=1)
    return set(range(int(result[1]), int(result[1]) + width))
