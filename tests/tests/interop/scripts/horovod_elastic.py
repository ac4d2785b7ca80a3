"""A program for Horovod's elastic launcher: every number of a data set is added up once, by whoever is there.

The last line of each rank: `horovod RANK/SIZE LOCAL_RANK/LOCAL_SIZE CROSS_RANK/CROSS_SIZE`.
"""

import horovod.torch as hvd
import torch

NUMBERS = 240
BATCH = 4


@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        for number, indices in enumerate(batches(state.sampler)):
            got = hvd.allreduce(torch.tensor([float(sum(indices))]), op=hvd.Sum, name="sum")
            state.total += got.item()
            state.model.weight.data += got.item()
            state.sampler.record_batch(number, BATCH)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def batches(sampler):
    indices = list(sampler)
    return [indices[first : first + BATCH] for first in range(0, len(indices), BATCH)]


def main():
    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sampler = hvd.elastic.ElasticSampler(list(range(NUMBERS)), shuffle=True)
    state = hvd.elastic.TorchState(model, sampler=sampler, epoch=0, total=0.0)
    train(state)
    wanted = 2.0 * sum(range(NUMBERS))
    if state.total != wanted or model.weight.item() != wanted:
        raise SystemExit(f"{state.total} and {model.weight.item()} instead of {wanted}")
    places = ((hvd.rank(), hvd.size()), (hvd.local_rank(), hvd.local_size()), (hvd.cross_rank(), hvd.cross_size()))
    hvd.shutdown()
    print("horovod", *(f"{place}/{count}" for place, count in places))


main()
