"""Horovod's operations, each with results that every rank can tell beforehand.

The last line of each rank: `horovod RANK/SIZE LOCAL_RANK/LOCAL_SIZE CROSS_RANK/CROSS_SIZE`.
"""

import math
import os

import horovod.torch as hvd
import torch


def same(what, got, wanted):
    got, wanted = torch.as_tensor(got), torch.as_tensor(wanted)
    if got.shape != wanted.shape or not torch.equal(got, wanted):
        raise SystemExit(f"{what}: {got} instead of {wanted}")


def reductions(rank, size):
    results = {
        hvd.Sum: size * (size + 1) / 2,
        hvd.Average: (size + 1) / 2,
        hvd.Min: 1.0,
        hvd.Max: float(size),
        hvd.Product: float(math.factorial(size)),
    }
    for length in (1, 1 << 18):
        mine = torch.full((length,), rank + 1.0)
        for op, result in results.items():
            same(f"allreduce {op}", hvd.allreduce(mine, op=op), torch.full((length,), result))
    total = results[hvd.Sum]
    whole = torch.arange(5) * (rank + 1)
    same("allreduce of integers", hvd.allreduce(whole, op=hvd.Sum), torch.arange(5) * int(total))

    handles = [hvd.allreduce_async(torch.tensor([rank + 1.0 + n]), op=hvd.Sum) for n in range(16)]
    for n, handle in enumerate(handles):
        same("allreduce_async", hvd.synchronize(handle), [total + n * size])
    both = hvd.grouped_allreduce([torch.ones(3), torch.full((2, 2), rank + 1.0)], op=hvd.Sum)
    same("grouped_allreduce", both[0], torch.full((3,), float(size)))
    same("grouped_allreduce", both[1], torch.full((2, 2), total))

    # One row more than ranks: the first has two.
    rows = torch.arange(size + 1.0).reshape(size + 1, 1)
    share = rows[:2] if rank == 0 else rows[rank + 1 : rank + 2]
    same("reducescatter", hvd.reducescatter(rows, op=hvd.Sum), share * size)


def movements(rank, size):
    got = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    same("allgather", got, torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)]))
    if hvd.allgather_object({"rank": rank}) != [{"rank": r} for r in range(size)]:
        raise SystemExit("allgather_object")

    for root in range(size):
        same("broadcast", hvd.broadcast(torch.full((3,), rank + 1.0), root_rank=root), torch.full((3,), root + 1.0))
        if hvd.broadcast_object(["from", rank], root_rank=root) != ["from", root]:
            raise SystemExit("broadcast_object")

    # Rank r sends p + 1 rows to rank p.
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    rows = torch.cat([torch.full((p + 1, 2), 10.0 * rank + p) for p in range(size)])
    got, lengths = hvd.alltoall(rows, splits=splits)
    same("alltoall", got, torch.cat([torch.full((rank + 1, 2), 10.0 * p + rank) for p in range(size)]))
    same("alltoall's lengths", lengths, torch.full((size,), rank + 1, dtype=lengths.dtype))
    hvd.barrier()


def process_sets(rank, size, even, odd):
    own = even if rank % 2 == 0 else odd
    ranks = list(range(rank % 2, size, 2))
    same("a process set's rank", own.rank(), ranks.index(rank))
    same("a process set's size", own.size(), len(ranks))
    mine = torch.tensor([float(rank)])
    same("allreduce in a set", hvd.allreduce(mine, op=hvd.Sum, process_set=own), [float(sum(ranks))])
    same("allgather in a set", hvd.allgather(mine, process_set=own), [float(r) for r in ranks])
    same("broadcast in a set", hvd.broadcast(mine, root_rank=ranks[-1], process_set=own), [float(ranks[-1])])

    # Taken away, and made anew while others exist.
    hvd.remove_process_set(odd)
    again = hvd.add_process_set(list(range(1, size, 2)))
    if again.included():
        same("allreduce in a new set", hvd.allreduce(mine, op=hvd.Sum, process_set=again), [float(sum(ranks))])


def training(size):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    (model(torch.ones(1, 2)) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    same("a step of training", model.weight.detach(), torch.full((1, 2), -(size + 1) / 2))


def join(rank, size):
    # Rank r has r + 1 batches. Who has joined counts as zero.
    for batch in range(rank + 1):
        got = hvd.allreduce(torch.ones(4), op=hvd.Average, name=f"batch {batch}")
        same("allreduce with joined ranks", got, torch.full((4,), (size - batch) / size))
    same("join", hvd.join(), size - 1)


def main():
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    size = int(os.environ["HOROVOD_SIZE"])
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    hvd.init(process_sets=[even, odd])
    rank = hvd.rank()
    same("HOROVOD_RANK", rank, int(os.environ["HOROVOD_RANK"]))
    reductions(rank, size)
    movements(rank, size)
    process_sets(rank, size, even, odd)
    training(size)
    join(rank, size)
    places = ((rank, hvd.size()), (hvd.local_rank(), hvd.local_size()), (hvd.cross_rank(), hvd.cross_size()))
    hvd.shutdown()
    print("horovod", *(f"{place}/{count}" for place, count in places))


main()
