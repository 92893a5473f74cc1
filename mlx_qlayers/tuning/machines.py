"""The figures of GPUs that the cost model stands on, and where they come from.

Sources: [A] Apple's product pages and newsroom (cores, bandwidth); [B] the measurements of
github.com/philipturner/metal-benchmarks on the M1 and M2 (cycles, threads, threadgroup memory);
[C] tzakharko's apple-neural-accelerators-benchmark (A19, the M5's generation); [D] clocks as
users report them; [E] NVIDIA's data sheet of the H200 and the measurements under
benchmarks/results. Figures marked (e) are estimates: nobody has published them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One GPU, as far as the cost model knows it.

    Attributes:
        name: what people call it.
        cores: GPU cores (multiprocessors); each starts four SIMD groups a cycle.
        gigabytes: device memory bandwidth, 1e9 bytes a second.
        gigahertz: clock.
        cached: the cache's bandwidth over that of device memory.
        latency: cycles that a load from device memory takes.
        threads: threads that a core holds at once, if their registers allow.
        registers: 32-bit registers of a core.
        threadgroup_memory: bytes that a core has for its threadgroups.
        threadgroup_bytes: bytes of threadgroup memory that a core moves in a cycle.
        load_cycles: cycles of a core for one load instruction of a SIMD group.
        matrix_cycles: cycles of a SIMD group for an 8 x 8 x 8 matrix operation.
        simd_cycles: cycles of a SIMD group for a reduction or shuffle.
        barrier_cycles: cycles of a SIMD group at a barrier.
        alu: arithmetic that a SIMD group does in the time of an M1 cycle.
        launch: seconds from one dependent launch to the next.
        overlap: how well what a launch takes in different ways hides behind the longest of them: 1
            not at all, infinity fully.
    """

    name: str
    cores: int
    gigabytes: float
    gigahertz: float
    cached: float = 3.0  # (e)
    latency: int = 500  # (e)
    threads: int = 1024 * 3  # [B]
    registers: int = 208 * 1024 // 4  # [B]
    threadgroup_memory: int = 60 * 1024  # [B]
    threadgroup_bytes: int = 64  # (e)
    load_cycles: float = 2.0  # (e)
    matrix_cycles: float = 17.5  # [B] between half and float
    simd_cycles: float = 14.5  # [B] simd_sum of floats
    barrier_cycles: float = 30.0  # (e)
    alu: float = 1.0
    overlap: float = 4.0  # (e)
    launch: float = 2.6e-6  # an M3 Ultra, in a chain: github.com/ml-explore/mlx issue 4521


# By the architecture that MLX names, `mx.device_info()["architecture"]`: g13 is the M1, g17 the M5;
# p, g, s and d are phone, base, Max (and, from the M3 on, Pro) and Ultra.
MACHINES = {
    "applegpu_g13g": Machine("M1", cores=8, gigabytes=68, gigahertz=1.28),
    "applegpu_g13s": Machine("M1 Max", cores=32, gigabytes=400, gigahertz=1.30),
    "applegpu_g13d": Machine("M1 Ultra", cores=64, gigabytes=800, gigahertz=1.30),
    "applegpu_g14g": Machine("M2", cores=10, gigabytes=102, gigahertz=1.40),
    "applegpu_g14s": Machine("M2 Max", cores=38, gigabytes=400, gigahertz=1.40),
    "applegpu_g14d": Machine("M2 Ultra", cores=76, gigabytes=819, gigahertz=1.40),
    "applegpu_g15g": Machine("M3", cores=10, gigabytes=102, gigahertz=1.40, load_cycles=1),
    "applegpu_g15s": Machine("M3 Max", cores=40, gigabytes=400, gigahertz=1.40, load_cycles=1),
    "applegpu_g15d": Machine("M3 Ultra", cores=80, gigabytes=819, gigahertz=1.40, load_cycles=1),
    "applegpu_g16g": Machine("M4", cores=10, gigabytes=120, gigahertz=1.50, load_cycles=1),
    "applegpu_g16s": Machine("M4 Max", cores=40, gigabytes=546, gigahertz=1.60, load_cycles=1),
    "applegpu_g17g": Machine("M5", cores=10, gigabytes=153, gigahertz=1.75, load_cycles=1),
    "applegpu_g17s": Machine("M5 Max", cores=40, gigabytes=614, gigahertz=1.75, load_cycles=1),
    # Loads of 16 bytes a thread move 64 a cycle. Shifts cost what additions do, and weights are
    # unpacked in few instructions: `alu`, `latency`, `matrix_cycles`, `overlap` are fitted.
    "sm_90": Machine(
        "H200",
        cores=132,
        gigabytes=4300,
        gigahertz=1.75,
        cached=2.5,
        latency=600,
        threads=2048,
        registers=65536,
        threadgroup_memory=228 * 1024,
        threadgroup_bytes=128,
        load_cycles=8,
        matrix_cycles=1,
        simd_cycles=10,
        alu=20,
        launch=2.5e-6,
        overlap=1.5,
    ),
}
