"""The time of a token of a model that ranks share, added up, and when ranks pay.

    python benchmarks/simulate_distributed.py
    python benchmarks/simulate_distributed.py --check benchmarks/results/distributed_cuda.csv

A block of a layer takes the time in which its share of the weights is read; tensor parallel ranks
then wait for each other and add up, stages of a pipeline hand the rows on.
Embeddings and head are on every rank, as mlx-lm's Llama has them. With ``--check`` the rate of the
device and the times of sums come from what ``bench_distributed.py`` measured, and its tokens of
sharded models are predicted from those of the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench_distributed import LLAMA_70B
from common import Table, arguments, output
from stored import Results


@dataclass(frozen=True)
class Shape:
    """A model in 4 bits with groups of 64; of experts, some are read for a token."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    experts: int = 1
    active: int = 1

    def attention(self) -> float:
        """Bytes of a layer's projections."""
        return _packed(2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim)

    def feed(self, experts: int) -> float:
        """Bytes of the matrices of so many experts of a layer."""
        return _packed(3 * self.hidden * self.width * experts)

    def head(self) -> float:
        return _packed(self.hidden * self.vocab)

    def held(self, ranks: int) -> float:
        """Bytes on a rank: its share, embeddings and head."""
        layer = self.attention() + self.feed(self.experts)
        return self.layers * layer / ranks + 2 * self.head()


def _packed(weights: float) -> float:
    return weights * (4 + 32 / 64) / 8


@dataclass(frozen=True)
class Link:
    """A connection of ranks: seconds until a message begins to arrive, then bytes a second.

    A mesh sends to all at once; around a ring a sum takes twice as many steps as there are others.
    """

    name: str
    latency: float
    rate: float
    ring: bool = False
    source: str = ""

    def sum(self, ranks: int, size: float) -> float:
        """Seconds to add up ``size`` bytes of each rank."""
        if ranks == 1:
            return 0.0
        if self.ring:
            return 2 * (ranks - 1) * (self.latency + size / ranks / self.rate)
        return self.latency + (ranks - 1) * size / self.rate


LLAMA = Shape("Llama 70B", 8192, 80, 64, 8, 128, 28672, 128256)
EXPERTS = Shape("480B, 8 of 160 experts", 6144, 62, 96, 8, 128, 2560, 151936, 160, 8)
# Bytes a second that decoding reaches, and of memory.
DEVICES = {"M3 Ultra": (0.75 * 819e9, 512e9), "H200": (2.9e12, 141e9)}
LINKS = {
    "M3 Ultra": (
        Link("Thunderbolt 5, JACCL", 15e-6, 6.5e9, source="ml-explore/mlx 2808, 3094"),
        Link("Thunderbolt 5, ring", 300e-6, 4e9, ring=True, source="ml-explore/mlx 2808"),
        Link("10 GbE, ring", 150e-6, 1.1e9, ring=True, source="TCP on a switched network"),
    ),
    "H200": (Link("NVLink, NCCL", 54e-6, 250e9, source="bench_distributed.py"),),
}
RANKS = (1, 2, 4, 8, 16)


def token(shape: Shape, ranks: int, rate: float, link: Link, how: str, batch: int = 1) -> float:
    """Seconds for a token of each of ``batch`` sequences.

    Args:
        shape: of the model.
        ranks: that share it.
        rate: bytes a second that a device reads.
        link: between them.
        how: ``"tensor"`` or ``"pipeline"``.
        batch: sequences; each may want experts of its own.
    """
    rows = 2 * shape.hidden * batch
    layer = shape.attention() + shape.feed(min(shape.experts, shape.active * batch))
    seconds = shape.layers * layer / rate
    if how == "tensor":  # ranks wait for each other behind attention and feed-forward
        seconds = seconds / ranks + 2 * shape.layers * link.sum(ranks, rows)
    elif ranks > 1:  # the stages take turns; the last one tells all
        seconds += ranks * (link.latency + rows / link.rate)
    return seconds + shape.head() / rate


def pays_until(shape: Shape, rate: float, link: Link) -> int:
    """The ranks of which twice as many would be less than a tenth faster."""
    times = [token(shape, n, rate, link, "tensor") for n in RANKS]
    pairs = zip(RANKS, times, times[1:], strict=False)
    return next((n for n, one, two in pairs if two > one / 1.1), RANKS[-1])


def plan() -> None:
    """Print what to expect of two models on the links there are."""
    table = Table()
    for device, links in LINKS.items():
        rate, memory = DEVICES[device]
        for shape in (LLAMA, EXPERTS):
            for link in links:
                for ranks in RANKS:
                    speeds = {how: 1 / token(shape, ranks, rate, link, how) for how in HOWS}
                    row = {how: f"{speed:.1f}" for how, speed in speeds.items()}
                    row["pays"] = "yes" if ranks <= pays_until(shape, rate, link) else "no"
                    fits = shape.held(ranks) < 0.75 * memory
                    row["GB a rank"] = f"{shape.held(ranks) / 1e9:.0f}" + " (!)" * (not fits)
                    table.add(model=shape.name, link=link.name, ranks=ranks, **row)
    print("\ntokens/s of one sequence, without attention to a context; (!) does not fit a", end=" ")
    print(", ".join(f"{name} of {size / 1e9:.0f} GB" for name, (_, size) in DEVICES.items()))
    for links in LINKS.values():
        for link in links:
            rate = f"{link.latency * 1e6:.0f} us, {link.rate / 1e9:.1f} GB/s"
            print(f"{link.name}: {rate} ({link.source})")


def check(path: Path) -> dict[str, float]:
    """Predicted over measured times of decoding, by what was decoded, for converted layers."""
    rows = Results.read(path).rows
    small = LLAMA_70B["num_hidden_layers"]
    shape = replace(LLAMA, layers=small)
    times = {row["what"]: row["ms"] * 1e-3 for row in rows}
    width = LLAMA_70B["hidden_size"]
    found, table = {}, Table()
    for row in rows:
        what, ranks = row["what"], int(row["ranks"])
        if not what.startswith("decode") or row["layers"] != "converted":
            continue
        batch = int(what.split()[-1])
        seconds = batch / row["tokens/s"]
        if ranks == 1:
            rate = token(shape, 1, 1.0, LINKS["H200"][0], "tensor", batch) / seconds
            continue
        link = Link("measured", times[f"sum of {batch} x {width}"], float("inf"))
        simulated = token(shape, ranks, rate, link, "tensor", batch)
        found[what] = simulated / seconds
        figures = {"measured ms": seconds * 1e3, "simulated ms": simulated * 1e3}
        table.add(task=f"{what}, {ranks} ranks", **figures)
    return found


HOWS = ("tensor", "pipeline")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--check", type=Path, metavar="CSV", help="of bench_distributed.py")
    args = parser.parse_args()
    with output(args, f"distributed_{'check' if args.check else 'plan'}"):
        check(args.check) if args.check else plan()


if __name__ == "__main__":
    main()
