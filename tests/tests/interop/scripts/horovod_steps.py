"""A program for Horovod's elastic launcher that takes steps until a file is there: `horovod_steps.py FILE`.

Each rank prints a line at each step: `step STEP RANK/SIZE PID`. The number of a step comes from the state that members share, which is checked
against the weight of a model.
"""

import os
import sys
import time

import horovod.torch as hvd
import torch


@hvd.elastic.run
def train(state):
    while True:
        # All members leave at the same step.
        is_over = hvd.allreduce(torch.tensor([float(os.path.exists(sys.argv[1]))]), op=hvd.Sum, name="over").item() > 0
        if is_over:
            return
        one = hvd.allreduce(torch.ones(1), op=hvd.Average, name="one").item()
        state.step += 1
        state.model.weight.data += one
        if state.model.weight.item() != state.step:
            raise SystemExit(f"the weight is {state.model.weight.item()} at step {state.step}")
        print("step", state.step, f"{hvd.rank()}/{hvd.size()}", os.getpid(), flush=True)
        time.sleep(0.02)
        state.commit()


def main():
    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    train(hvd.elastic.TorchState(model, step=0))
    print("done", f"{hvd.rank()}/{hvd.size()}", os.getpid(), flush=True)
    hvd.shutdown()


main()
