"""Steps of a group under Horovod: a sum of one number, and a commit of a state.

Arguments: the size of the state in bytes, and `once` for one step without elasticity. After its first step in a group each rank prints
`peer RANK SIZE PID STEPPED BEGAN ENTERED`: when that step had ended, when the process had begun, and when Python and the framework were there.
Times are milliseconds of the clock that all processes of a host share.
"""

import os
import sys
import time

import horovod.torch as hvd
import torch


def now():
    return time.monotonic() * 1e3


ENTERED = now()
with open("/proc/self/stat") as stat:
    BEGAN = int(stat.read().rsplit(")", 1)[1].split()[19]) * 1e3 / os.sysconf("SC_CLK_TCK")


def step(is_first):
    hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step")
    if is_first:
        # In one write: ranks may share their output.
        os.write(1, f"peer {hvd.rank()} {hvd.size()} {os.getpid()} {now()} {BEGAN} {ENTERED}\n".encode())


@hvd.elastic.run
def steps(state):
    is_first = True
    while True:
        step(is_first)
        is_first = False
        state.steps += 1
        state.commit()
        time.sleep(0.002)


size, once = int(sys.argv[1]), sys.argv[2:] == ["once"]
hvd.init()
if once:
    step(True)
elif size:
    model = torch.nn.Module()
    model.data = torch.nn.Parameter(torch.zeros(size // 4), requires_grad=False)
    steps(hvd.elastic.TorchState(model, steps=0))
else:
    steps(hvd.elastic.TorchState(steps=0))
