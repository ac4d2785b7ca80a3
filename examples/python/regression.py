"""Fits a line to points that are spread over all ranks. Any launcher that sets torch's variables starts it:

    kolo run -n 4 -- python3 examples/python/regression.py

The script knows nothing of kolo. A rank finds its place in RANK and WORLD_SIZE, and where rank 0 is in MASTER_ADDR and
MASTER_PORT. Each rank makes its own points around y = 3x - 1, and adds up five numbers; rank 0 collects these and solves
for the line. numpy does the sums where it is installed, plain Python elsewhere.
"""

import os
import random
import time
from multiprocessing.connection import Client, Listener

try:
    import numpy
except ImportError:
    numpy = None

POINTS = 100_000


def sums(rank, size):
    """The number of this rank's points, and the sums of x, y, x * x and x * y."""
    count = POINTS // size
    if numpy:
        numbers = numpy.random.default_rng(rank)
        x = numbers.uniform(0, 10, count)
        y = 3 * x - 1 + numbers.normal(0, 1, count)
        return [float(count), *(float(part.sum()) for part in (x, y, x * x, x * y))]
    numbers = random.Random(rank)
    total = [float(count), 0.0, 0.0, 0.0, 0.0]
    for _ in range(count):
        x = numbers.uniform(0, 10)
        y = 3 * x - 1 + numbers.gauss(0, 1)
        for index, part in enumerate((x, y, x * x, x * y), start=1):
            total[index] += part
    return total


def call(address, key):
    """A connection to rank 0, which may not listen yet."""
    end = time.monotonic() + 30
    while True:
        try:
            return Client(address, authkey=key)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = os.environ.get("TORCHELASTIC_RUN_ID", "regression").encode()
    mine = sums(rank, size)
    if rank > 0:
        with call(address, key) as chief:
            chief.send(mine)
        return
    parts = [mine]
    with Listener(address, authkey=key) as listener:
        while len(parts) < size:
            with listener.accept() as worker:
                parts.append(worker.recv())
    n, x, y, xx, xy = (sum(part) for part in zip(*parts))
    slope = (n * xy - x * y) / (n * xx - x * x)
    print(f"regression: slope={slope:.1f} intercept={(y - slope * x) / n:.1f} points={n:.0f} workers={size}", flush=True)


if __name__ == "__main__":
    main()
