"""Steps of a group of torch.distributed: a sum of one number, after all have got a state from rank 0.

Arguments and output are those of steps_horovod.py.
"""

import os
import sys
import time

import torch
import torch.distributed as dist


def now():
    return time.monotonic() * 1e3


ENTERED = now()
with open("/proc/self/stat") as stat:
    BEGAN = int(stat.read().rsplit(")", 1)[1].split()[19]) * 1e3 / os.sysconf("SC_CLK_TCK")

size, once = int(sys.argv[1]), sys.argv[2:] == ["once"]
dist.init_process_group("gloo")
if size:
    dist.broadcast(torch.zeros(size // 4), src=0)
is_first = True
while is_first or not once:
    dist.all_reduce(torch.ones(1))
    if is_first:
        # In one write: ranks may share their output.
        rank, count = dist.get_rank(), dist.get_world_size()
        os.write(1, f"peer {rank} {count} {os.getpid()} {now()} {BEGAN} {ENTERED}\n".encode())
        is_first = False
    if not once:
        time.sleep(0.002)
dist.destroy_process_group()
