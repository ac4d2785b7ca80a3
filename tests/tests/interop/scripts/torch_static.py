"""torch.distributed and DistributedDataParallel on gloo, with what a process alone computes as the measure.

The last line of each rank: `torch RANK/SIZE LOCAL_RANK/LOCAL_SIZE GROUP_RANK/GROUPS`.
"""

import copy
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def same(what, got, wanted):
    got, wanted = torch.as_tensor(got), torch.as_tensor(wanted)
    if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=0, atol=1e-5):
        raise SystemExit(f"{what}: {got} instead of {wanted}")


def collectives(rank, size):
    for length in (1, 1 << 18):
        data = torch.full((length,), rank + 1.0)
        dist.all_reduce(data)
        same("all_reduce", data, torch.full((length,), size * (size + 1) / 2))
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    same("all_gather", torch.cat(parts), torch.arange(float(size)).repeat_interleave(2))
    for root in range(size):
        data = torch.full((3,), rank + 1.0)
        dist.broadcast(data, src=root)
        same("broadcast", data, torch.full((3,), root + 1.0))
    found = [None] * size
    dist.all_gather_object(found, f"rank {rank}")
    if found != [f"rank {r}" for r in range(size)]:
        raise SystemExit(f"all_gather_object: {found}")
    # A group of its own for every second rank; all ranks make both.
    groups = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    data = torch.tensor([1.0])
    dist.all_reduce(data, group=groups[rank % 2])
    same("all_reduce in a group", data, [float(len(range(rank % 2, size, 2)))])
    dist.barrier()


def training(rank, size):
    # Each rank begins elsewhere; DistributedDataParallel gives all what rank 0 has.
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
    alone = copy.deepcopy(model.module)
    torch.manual_seed(size)
    inputs = torch.randn(4 * size, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    shards = ((model, inputs[rank::size], targets[rank::size]), (alone, inputs, targets))
    for network, batch, target in shards:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(batch), target).backward()
            optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    same("training on shares", weights, torch.nn.utils.parameters_to_vector(alone.parameters()).detach())
    everyone = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everyone, weights)
    for other in everyone:
        same("the weights of other ranks", other, weights)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives(rank, size)
    training(rank, size)
    dist.destroy_process_group()
    names = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE"))
    print("torch", *(f"{os.environ[place]}/{os.environ[count]}" for place, count in names))


main()
