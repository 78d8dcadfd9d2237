"""README's table of training steps and those of other frameworks, from the latest measurements in results.csv.

python -m benchmarks.peer_table

prints the table; ``--prune`` first removes measurements of which a later one exists in results.csv: of the same figure,
on the same kind of machine.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator

from benchmarks.results import RESULTS

Record = dict[str, str]
CONTENDERS = {
    "dp1, torch": ("1 rank", "torch"),
    "llama dp1, transformers": ("1 rank, Llama", "transformers"),
    "dp2, DDP": ("dp2", "DDP"),
    "zero1, DeepSpeed 1": ("dp2 ZeRO 1", "DeepSpeed"),
    "zero3, FSDP2": ("dp2 ZeRO 3", "FSDP2"),
    "zero3, DeepSpeed 3": ("dp2 ZeRO 3", "DeepSpeed"),
    "tp2, Megatron": ("tp2", "Megatron Core"),
    "tp2 sp, Megatron": ("tp2 sp", "Megatron Core"),
    "pp2, 1F1B": ("pp2 (1F1B)", "torch"),
    "tp2 pp2, Megatron": ("tp2 pp2", "Megatron Core"),
    "llama tp2, Megatron": ("tp2, Llama", "Megatron Core"),
    "moe dp2 ep2, Megatron": ("dp2 ep2, Mixtral", "Megatron Core"),
}
"""Layout and peer of a row of the table, by contender of bench_peers."""
HEAD = ("Layout", "Peer", "tokens/s", "of the peer", "ratio", "with AVX2", "memory, MB", "of the peer")


def records() -> list[Record]:
    """All measurements, the latest last."""
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def latest(measured: Iterable[Record]) -> list[Record]:
    """The latest measurement of each figure on each kind of machine, in their order."""
    by_figure: dict[tuple[str, ...], Record] = {}
    for record in measured:
        figure = tuple(record[name] for name in ("benchmark", "contender", "unit", "machine"))
        by_figure.pop(figure, None)
        by_figure[figure] = record
    return list(by_figure.values())


def table(measured: Iterable[Record]) -> Iterator[str]:
    """Yield the lines of the Markdown table."""
    peers = [record for record in latest(measured) if record["benchmark"] == "bench_peers"]
    avx512 = {record["contender"]: record for record in peers if "AVX512" in record["machine"]}
    avx2 = {record["contender"]: record for record in peers if "AVX2" in record["machine"]}
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    for contender, (layout, name) in CONTENDERS.items():
        peer = avx512[contender]
        engine = avx512[contender.partition(",")[0]]
        rates = [f"{float(record['value']):,.0f}" for record in (engine, peer)]
        ratios = [f"{float(record['ratio']):.2f}" for record in (peer, avx2[contender])]
        memory = [f"{int(record['memory_bytes']) / 1e6:.0f}" for record in (engine, peer)]
        yield f"| {' | '.join([layout, name, *rates, *ratios, *memory])} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prune", action="store_true", help="first remove measurements of which a later one exists")
    if parser.parse_args().prune:
        kept = latest(records())
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, kept[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
    print(*table(records()), sep="\n")


if __name__ == "__main__":
    main()
