"""Times for other numbers of GPUs, from measured ones: lines through bytes read and bytes sent.

A decode takes ``a + b x bytes of keys on a rank``, fitted over the lengths of a layout and batch. An exchange takes
``l + c x bytes sent``, fitted over the batches of a layout and exchange. The latency ``l`` of a larger group is not
known from a smaller one: it is given as it was measured (low) and as if each further peer cost as much as a measured
one (high). The merge kernels read the same bytes whatever the number of ranks. All GPUs are taken to be linked as the
measured ones are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope of the least-squares line, neither of them below 0; points of one x have slope 0."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope


def bytes_sent(row: Row, world: int) -> float:
    """Bytes that one rank sends in the exchange of a row."""
    rows = row["batch"] * row["heads"]
    if row["exchange"] == "all_to_all":
        return float(rows * (row["value_dim"] * 2 + 16) * (world - 1) / world)
    return float(rows * 4 * (world - 1) + rows * row["value_dim"] * 4 * (world - 1) / world)


def bytes_read(row: Row, world: int) -> float:
    """Bytes of keys and values that one rank reads."""
    return float(row["batch"] * row["kv_len"] * row["token_bytes"] / world)


def predictions(rows: Sequence[Row], worlds: Sequence[int]) -> list[dict[str, Any]]:
    """Microseconds of a step for each row and number of GPUs: ``low`` and ``high`` by the latency of the exchange."""
    found = []
    for row in rows:
        alike = [r for r in rows if all(r[name] == row[name] for name in ("layout", "world", "exchange"))]
        of_batch = [r for r in alike if r["batch"] == row["batch"]]
        read = line([(bytes_read(r, r["world"]), r["decode_us"]) for r in of_batch])
        sent = line([(bytes_sent(r, r["world"]), r["communication_us"]) for r in alike])
        for world in worlds:
            decode = read[0] + read[1] * bytes_read(row, world)
            moved = sent[1] * bytes_sent(row, world)
            peers = (world - 1) / (row["world"] - 1)
            times = [decode + row["merge_us"] + moved + latency for latency in (sent[0], sent[0] * peers)]
            named = {name: row[name] for name in ("layout", "exchange", "batch", "kv_len")}
            named |= {"measured_on": row["world"], "world": world}
            found.append({**named, "low_us": times[0], "high_us": times[1]})
    return found
