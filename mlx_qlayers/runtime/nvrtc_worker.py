"""Compiles one CUDA kernel with NVRTC. For NVIDIA GPUs alone, frozen.

It is a program of its own, since NVRTC holds a lock in a process, and imports nothing of the
package, so that it starts at once. Standard input holds JSON: ``library``, ``text``, ``name`` and
``options``. Standard output gets the kernel's mangled name in a line, then the machine code.
"""

import ctypes
import json
import sys


def compiled(library: str, text: str, name: str, options: list[str]) -> tuple[bytes, bytes]:
    """The mangled name of a kernel, and its machine code."""
    nvrtc = ctypes.CDLL(library)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(function: str, *args: object) -> None:
        if code := getattr(nvrtc, function)(*args):
            raise RuntimeError(f"{function} gave {code}")

    call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"k.cu", 0, None, None)
    call("nvrtcAddNameExpression", program, name.encode())
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), given):
        call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call("nvrtcGetProgramLog", program, log)
        raise RuntimeError(log.value.decode(errors="replace"))
    mangled = ctypes.c_char_p()
    call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(mangled))
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, code)
    return mangled.value or b"", code.raw


if __name__ == "__main__":
    name, code = compiled(**json.load(sys.stdin))
    sys.stdout.buffer.write(name + b"\n" + code)
