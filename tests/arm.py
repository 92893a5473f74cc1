"""Kernels that are compiled for processors of ARM, and executed on an emulated one.

Unicorn knows dot products, but not those of signed with unsigned bytes, ``usdot`` of the I8MM
extension: that instruction is executed here, as Arm's manual describes it.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import kernel_assembly
import numpy as np

from mlx_qlayers.runtime.host import cache, toolchain

# Of a 32-bit instruction the bits that say which it is: of vectors of 16 bytes.
_MASK = 0xFFE0FC00
DOTS = {0x4E809400: "sdot", 0x6E809400: "udot", 0x4E809C00: "usdot"}
_PAGE, _STACK, _DATA, _END = 1 << 12, 0x7000_0000, 0x4000_0000, 0x1000
_ROOM = 1 << 20
_ENTRY, _TABLE, _COUNT = (("<Q", 24), ("<Q", 32), ("<H", 56))  # of an ELF file
_LOADED = 1
# The functions that a kernel takes from C's library.
_LIBRARY = """
void *memset(void *to, int value, unsigned long n) {
  for (volatile char *at = to; n--;) *at++ = value;
  return to;
}
void *memcpy(void *to, const void *from, unsigned long n) {
  const char *next = from;
  for (volatile char *at = to; n--;) *at++ = *next++;
  return to;
}
"""


def compiled(text: str, function: str, cpu: str) -> Path:
    """A folder with ``kernel.s`` and the program ``kernel`` of the fast build, from the cache."""
    target = ("-target", "aarch64-linux-gnu", f"-mcpu={cpu}")

    def make(folder: Path) -> None:
        assembly, kernel, memory = (folder / name for name in ("kernel.s", "kernel.o", "memory.o"))
        assembly.write_text(kernel_assembly.assembly(text, function, target[1:]))
        toolchain.run(["clang", *target, "-c", str(assembly)], output=kernel)
        plain = ["-ffreestanding", "-fno-builtin", "-O1", "-c", "-"]
        toolchain.run(["clang", "-x", "c", *target, *plain], _LIBRARY, memory)
        linked = ["-static", "-e", "qk_entry", str(kernel), str(memory)]
        toolchain.run(["ld.lld", *linked], output=folder / "kernel")

    made_by = (Path(path).read_text() for path in (__file__, kernel_assembly.__file__))
    return cache.entry(toolchain.key("arm", text, function, cpu, *made_by), make)


class Processor:
    """An emulated processor with the program of a kernel.

    Attributes:
        executed: how often it executed instructions: ``"all"``, and each of :data:`DOTS`.
    """

    def __init__(self, program: bytes) -> None:
        import unicorn
        from unicorn import arm64_const as names

        self.executed: Counter[str] = Counter()
        self._names, self._blocks = names, dict[int, Counter[str]]()
        self._uc = uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        uc.ctl_set_cpu_model(names.UC_CPU_ARM64_MAX)
        (self._entry,), (table,), (count,) = (
            struct.unpack_from(kind, program, at) for kind, at in (_ENTRY, _TABLE, _COUNT)
        )
        uc.mem_map(0, _STACK - _ROOM)
        uc.mem_map(_STACK, _ROOM)
        for i in range(count):
            kind, _, at, address, _, size = struct.unpack_from("<IIQQQQ", program, table + 56 * i)
            if kind == _LOADED:
                uc.mem_write(address, program[at : at + size])
        uc.reg_write(names.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vectors are not trapped
        uc.hook_add(unicorn.UC_HOOK_INTR, self._undefined)
        uc.hook_add(unicorn.UC_HOOK_BLOCK, self._count)

    def _count(self, uc: object, address: int, size: int, _: object) -> None:
        if address not in self._blocks:
            words = np.frombuffer(self._uc.mem_read(address, size), "<u4")
            found = Counter(DOTS[w & _MASK] for w in words.tolist() if w & _MASK in DOTS)
            self._blocks[address] = found + Counter(all=words.size)
        self.executed += self._blocks[address]

    def _undefined(self, uc: object, number: int, _: object) -> None:
        read, write = self._uc.reg_read, self._uc.reg_write
        at = read(self._names.UC_ARM64_REG_PC)
        (word,) = struct.unpack("<I", self._uc.mem_read(at, 4))
        if DOTS.get(word & _MASK) != "usdot":
            raise RuntimeError(f"interrupt {number} at {at:#x}, instruction {word:#x}")
        vectors = [self._names.UC_ARM64_REG_V0 + (word >> shift & 31) for shift in (0, 5, 16)]
        to, left, right = (
            np.frombuffer(read(v).to_bytes(16, "little"), kind).astype(np.int64)
            for v, kind in zip(vectors, ("<i4", "u1", "i1"), strict=True)
        )
        sums = (to + (left * right).reshape(4, 4).sum(1)).astype("<i4")
        write(vectors[0], int.from_bytes(sums.tobytes(), "little"))
        write(self._names.UC_ARM64_REG_PC, at + 4)

    def run(self, arrays: Sequence[np.ndarray], threads: int) -> list[np.ndarray]:
        """Contents of the kernel's buffers, given in order, after threadgroups of one thread."""
        uc, names = self._uc, self._names
        ends = np.cumsum([0, *(-(-x.nbytes // 64) * 64 for x in arrays)])
        places = [_DATA + _PAGE + int(end) for end in ends[:-1]]
        for place, x in zip(places, arrays, strict=True):
            uc.mem_write(place, x.tobytes())
        uc.mem_write(_DATA, struct.pack(f"<{len(places)}Q", *places))
        for i in range(threads):
            # struct qk_thread: no SIMD group, and three numbers of each kind.
            numbers = *[0] * 5, i, 0, 0, *[1] * 6, threads, 1, 1, threads, 1, 1
            thread = _DATA + _PAGE // 2
            uc.mem_write(thread, struct.pack("<Q20I", 0, *numbers))
            registers = (names.UC_ARM64_REG_X0, thread), (names.UC_ARM64_REG_X1, _DATA)
            stack = names.UC_ARM64_REG_SP, _STACK + _ROOM
            for register, value in (*registers, stack, (names.UC_ARM64_REG_LR, _END)):
                uc.reg_write(register, value)
            uc.emu_start(self._entry, _END)
        return [
            np.frombuffer(bytes(uc.mem_read(place, x.nbytes)), x.dtype).reshape(x.shape)
            for place, x in zip(places, arrays, strict=True)
        ]
