"""The cost of arithmetic: cycles of a SIMD group on an Apple M1, by instructions of LLVM's IR.

Source: the measurements of github.com/philipturner/metal-benchmarks for the M1 and M2. Integer
division and the address arithmetic of ``getelementptr`` were not measured there and are guesses.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^  (?:%[\w.]+ = )?(?:(?:tail|notail|musttail) )?(\w+) (.*)")
_LANES = re.compile(r"<(\d+) x ")
_FUNCTION = re.compile(r"@(?:llvm\.)?(\w+)")
_COSTS = {
    1: "fadd fsub fmul add sub and or xor icmp fcmp select fpext fptrunc getelementptr",
    4: "mul shl lshr ashr sitofp uitofp fptosi fptoui",
    6: "fdiv",
    32: "sdiv udiv srem urem",
}
_CYCLES = {name: cost for cost, names in _COSTS.items() for name in names.split()}
# A shift right by an amount that the program works out.
_SHIFT_RIGHT = 8
_FUNCTIONS = {"fma": 1, "fmuladd": 1, "smin": 1, "smax": 1, "umin": 1, "umax": 1, "fabs": 1}
_FUNCTIONS |= {"minnum": 1, "maxnum": 1, "exp2": 4, "log2": 4, "sqrt": 15, "exp": 5, "log": 5}


def cycles(instruction: str) -> int:
    """The cycles of one line of IR; 0 for what is no arithmetic."""
    match = _INSTRUCTION.match(instruction)
    if match is None:
        return 0
    name, operands = match.groups()
    if name == "call":
        function = _FUNCTION.search(operands)
        each = _FUNCTIONS.get(function[1], 0) if function else 0
    else:
        each = _CYCLES.get(name, 0)
        if name in ("lshr", "ashr") and operands.rpartition(",")[2].lstrip().startswith("%"):
            each = _SHIFT_RIGHT
    lanes = _LANES.search(operands.partition(",")[0]) if each and name != "getelementptr" else None
    return each * int(lanes[1]) if lanes else each
