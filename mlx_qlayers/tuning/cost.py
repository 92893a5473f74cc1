"""What a launch should take on a GPU that is not here: a roofline over what the host counted.

The checked build of the host backend counts what a launch does. Divided by what a machine can do in
a second, each count is a time; the longest bounds the launch from below, and the others hide behind
it only in part. The core with the most threadgroups counts, and it is not done before its threads
have gone through their instructions and waits, one after the other. What the model cannot know: how
many registers a compiler takes (kernel families estimate what it must hold), how it merges loads,
what a cache keeps, how clocks move. It ranks; it does not promise.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline", 2009.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil

from ..runtime.host.compiled_kernel import Counters
from .machines import Machine

# Registers that compilers take, if they may, for each that a thread must have. This and the next
# are fitted to an H200, see README.md.
_AHEAD = 1.6
# Cycles from one instruction of a thread to the next that needs its result.
_DEPENDENT = 2
# Waits of a threadgroup besides those of its loops: to begin, to combine what it has, to write it.
_START = 4
# What a thread can address.
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class Cost:
    """The parts of a launch's time, in seconds, as if each were alone.

    Attributes:
        memory: device memory, each byte once, and the cache for those read again.
        loads: starting the load and store instructions.
        latency: one thread's turns of loops, which wait for memory, and its arithmetic.
        alu: arithmetic, reductions, barriers.
        matrix: matrix operations.
        threadgroup: threadgroup memory and its bank conflicts.
        launch: what every launch takes.
        overlap: the exponent of the norm that adds the others up.
    """

    memory: float
    loads: float
    latency: float
    alu: float
    matrix: float
    threadgroup: float
    launch: float
    overlap: float

    @property
    def seconds(self) -> float:
        """The whole: the longest part, and some of the others."""
        parts = (self.memory, self.loads, self.latency, self.alu + self.matrix, self.threadgroup)
        return float(sum(part**self.overlap for part in parts) ** (1 / self.overlap) + self.launch)


def cost(
    counters: Counters,
    machine: Machine,
    times: float = 1.0,
    registers: int = 32,
    resident: int = 1,
) -> Cost:
    """The time of one launch on a machine.

    Args:
        counters: what the checked build of ``host`` counted.
        machine: from :data:`machines.MACHINES`.
        times: how many times as many threadgroups the launch has.
        registers: 32-bit registers that a thread needs; an estimate.
        resident: threadgroups that the compiler must leave a core's registers for. A thread gets
            no more than its share then, and what it needs beyond that is kept in memory.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> from mlx_qlayers.runtime.host import checks
        >>> from mlx_qlayers.tuning.machines import MACHINES
        >>> with use_backend("host"), checks() as report:
        ...     y = exp(mx.ones(1024))
        >>> 1e-6 < cost(report.launches[0][1], MACHINES["applegpu_g13s"]).seconds < 1e-5
        True
    """
    c, m = _more(counters, times), machine
    threads = ceil(c.threads / c.threadgroups)
    simds = ceil(threads / 32)
    most = min(_MOST_REGISTERS, m.registers // (threads * max(1, resident)))
    fitting = max(
        1,
        min(
            m.threads // threads,
            m.threadgroup_memory // max(1, c.threadgroup_memory),
            m.registers // (threads * min(round(registers * _AHEAD), most)),
        ),
    )
    # Threadgroups of the core that has the most, so many at a time, one set after another.
    share = ceil(c.threadgroups / m.cores)
    rounds = ceil(share / fitting)
    hertz = m.gigahertz * 1e9
    # What one threadgroup takes of a core, in cycles of one of its four schedulers.
    simd = c.simd_operations + c.quad_operations
    barriers = c.threadgroup_barriers * simds + c.simdgroup_barriers
    alu = c.alu_cycles / 32 / m.alu + simd * m.simd_cycles + barriers * m.barrier_cycles
    alu, matrix = alu / c.threadgroups, c.matrix_operations * m.matrix_cycles / c.threadgroups
    loads = (c.loads + c.stores) / 32 * m.load_cycles / c.threadgroups
    moved = (c.threadgroup_read + c.threadgroup_written) / m.threadgroup_bytes + c.bank_conflicts
    waits = (_START + c.turns / c.threads) * m.latency
    return Cost(
        memory=_memory(c, m, min(fitting, share) * threads, max(0, registers - most)),
        loads=share * loads / hertz,
        latency=rounds * (waits + (alu + matrix) / simds * _DEPENDENT) / hertz,
        alu=share * alu / 4 / hertz,
        matrix=share * matrix / 4 / hertz,
        threadgroup=share * moved / c.threadgroups / hertz,
        launch=m.launch,
        overlap=m.overlap,
    )


def _memory(c: Counters, m: Machine, threads: int, spilled: int) -> float:
    """Seconds for device memory, with so many threads of a core at once."""
    distinct = c.distinct_read + c.distinct_written
    # What does not fit into registers is written and read in each turn.
    again = c.bytes_read + c.bytes_written - distinct + 8 * spilled * c.turns
    # Bandwidth takes loads under way: as many as threads have started while one comes back.
    under_way = threads * min(m.cores, c.threadgroups)
    per_load = (c.bytes_read + c.bytes_written) / max(1, c.loads + c.stores)
    per_turn = max(1.0, (c.loads + c.stores) / max(1, c.turns))
    sustained = under_way * per_load * per_turn * m.gigahertz * 1e9 / m.latency
    bandwidth = min(m.gigabytes * 1e9, sustained)
    return distinct / bandwidth + again / (m.cached * m.gigabytes * 1e9)


def _more(counters: Counters, times: float) -> Counters:
    """What so many times as many threadgroups do."""
    if times == 1:
        return counters
    fixed = ("bank_ways", "threadgroup_memory")
    counts = {n: v if n in fixed else round(v * times) for n, v in asdict(counters).items()}
    return Counters(**counts)
