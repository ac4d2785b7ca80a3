"""Steps of a group under Horovod: a sum of one number, and a commit of a state.

After its first step in a group each rank prints
`peer RANK SIZE PID STEPPED BEGAN ENTERED`: when that step had ended, when the process had begun, and when Python and the framework were there.
Times are milliseconds of the clock that all processes of a host share.
"""

import os
import time

import horovod.torch as hvd
import torch


def now():
    return time.monotonic() * 1e3


ENTERED = now()
with open("/proc/self/stat") as stat:
    BEGAN = int(stat.read().rsplit(")", 1)[1].split()[19]) * 1e3 / os.sysconf("SC_CLK_TCK")


@hvd.elastic.run
def steps(state):
    is_first = True
    while True:
        hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step")
        if is_first:
            # In one write: ranks may share their output.
            os.write(1, f"peer {hvd.rank()} {hvd.size()} {os.getpid()} {now()} {BEGAN} {ENTERED}\n".encode())
        is_first = False
        state.steps += 1
        state.commit()
        time.sleep(0.002)


hvd.init()
steps(hvd.elastic.TorchState(steps=0))
