"""Steps of a group of torch.distributed that goes on from its last checkpoint when it is started anew, until a file tells it to stop.

Argument: a folder, for the checkpoint and for the file `stop`. Each line begins with a word, RANK/SIZE, the count of restarts, and the group:
`entered .. PID` when torch is there, `began .. STEP` when the group is, `step .. STEP` of rank 0, and `ended .. STEP`.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ENV = os.environ
PLACE = f"{ENV['RANK']}/{ENV['WORLD_SIZE']} {ENV['TORCHELASTIC_RESTART_COUNT']} {ENV['KOLO_GENERATION']}"


def say(word, number):
    print(word, PLACE, number, flush=True)


def write(path, step):
    with open(path + ".new", "w") as file:
        file.write(str(step))
    os.rename(path + ".new", path)


def main():
    say("entered", os.getpid())
    path, stop = (os.path.join(sys.argv[1], name) for name in ("checkpoint", "stop"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    step = torch.zeros(1, dtype=torch.int64)
    if rank == 0 and os.path.exists(path):
        with open(path) as file:
            step[0] = int(file.read())
    dist.broadcast(step, src=0)
    say("began", step.item())
    is_over = False
    while not is_over:
        # Rank 0 alone looks for the file, so that all stop at the same step.
        numbers = torch.tensor([rank + 1, rank == 0 and os.path.exists(stop)])
        dist.all_reduce(numbers)
        total, is_over = numbers.tolist()
        if total != size * (size + 1) // 2:
            raise SystemExit(f"step {step.item()}: {total} of {size} ranks")
        step += 1
        if rank == 0:
            write(path, step.item())
            say("step", step.item())
        time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()
    say("ended", step.item())


main()
