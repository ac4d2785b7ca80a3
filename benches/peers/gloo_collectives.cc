// One rank of Gloo over TCP, for kolo-bench: gloo_collectives SOCKET OPERATION RANK RANKS STORE ADDRESS
//
// Buffers are registered once for each series, as Gloo likes it. all_reduce has variants: the bench tries all and takes the fastest.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/gather.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/scatter.h>
#include <gloo/transport/tcp/device.h>

#include <exception>
#include <functional>
#include <memory>

#include "rank.h"

enum { RING, BCUBE, HALVING_DOUBLING, RING_CHUNKED, VARIANTS };

// Messages of pairs; Gloo's own operations use others.
enum { PAIR = 0x77 };

static std::shared_ptr<gloo::rendezvous::Context> context;
static std::function<void(struct job *)> once;

static void meet() {
  gloo::BarrierOptions options(context);
  options.setTag(1);
  gloo::barrier(options);
}

static void add(void *into, const void *one, const void *other, size_t count) {
  gloo::sum<float>(into, one, other, count);
}

static float *begin(struct job *job) {
  size_t share = job->share;
  switch (job->operation) {
    case ALL_REDUCE: {
      if (job->variant == HALVING_DOUBLING || job->variant == RING_CHUNKED) {
        std::shared_ptr<gloo::Algorithm> made;
        std::vector<float *> memory{job->give};
        if (job->variant == HALVING_DOUBLING)
          made = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(context, memory, (int)share);
        else
          made = std::make_shared<gloo::AllreduceRingChunked<float>>(context, memory, (int)share);
        once = [made](struct job *) { made->run(); };
        break;
      }
      auto options = std::make_shared<gloo::AllreduceOptions>(context);
      options->setAlgorithm(job->variant == BCUBE ? gloo::AllreduceOptions::Algorithm::BCUBE
                                                  : gloo::AllreduceOptions::Algorithm::RING);
      options->setReduceFunction(add);
      options->setOutput(job->get, share);
      once = [options](struct job *) { gloo::allreduce(*options); };
      break;
    }
    case ALL_GATHER: {
      auto options = std::make_shared<gloo::AllgatherOptions>(context);
      options->setInput(job->give, share);
      options->setOutput(job->get, share * job->ranks);
      once = [options](struct job *) { gloo::allgather(*options); };
      break;
    }
    case BROADCAST: {
      auto options = std::make_shared<gloo::BroadcastOptions>(context);
      options->setOutput(job->get, share);
      once = [options](struct job *now) {
        options->setRoot(now->root);
        gloo::broadcast(*options);
      };
      break;
    }
    case REDUCE: {
      auto options = std::make_shared<gloo::ReduceOptions>(context);
      options->setReduceFunction(add);
      options->setOutput(job->get, share);
      once = [options](struct job *now) {
        options->setRoot(now->root);
        gloo::reduce(*options);
      };
      break;
    }
    case GATHER: {
      auto options = std::make_shared<gloo::GatherOptions>(context);
      options->setInput(job->give, share);
      options->setOutput(job->get, share * job->ranks);
      once = [options](struct job *now) {
        options->setRoot(now->root);
        gloo::gather(*options);
      };
      break;
    }
    case SCATTER: {
      auto options = std::make_shared<gloo::ScatterOptions>(context);
      std::vector<float *> parts;
      for (int rank = 0; rank < job->ranks; rank++) parts.push_back(job->give + rank * share);
      options->setInputs(parts, share);
      options->setOutput(job->get, share);
      once = [options](struct job *now) {
        options->setRoot(now->root);
        gloo::scatter(*options);
      };
      break;
    }
    case SEND_RECEIVE: {
      std::shared_ptr<gloo::transport::UnboundBuffer> give =
          context->createUnboundBuffer(job->give, share * sizeof(float));
      std::shared_ptr<gloo::transport::UnboundBuffer> get =
          context->createUnboundBuffer(job->get, share * sizeof(float));
      once = [give, get](struct job *now) {
        // What is to be received is said before, as Gloo's own operations do.
        get->recv(partner(now), PAIR);
        if (now->rank > partner(now)) get->waitRecv();
        give->send(partner(now), PAIR);
        give->waitSend();
        if (now->rank < partner(now)) get->waitRecv();
      };
      break;
    }
    case REDUCE_SCATTER: {
      // It works in place, and leaves this rank's part in front.
      std::vector<int> parts(job->ranks, (int)share);
      auto made = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
          context, std::vector<float *>{job->give}, (int)share * job->ranks, parts);
      once = [made](struct job *) { made->run(); };
      return job->give;
    }
    case ALL_TO_ALL: {
      auto options = std::make_shared<gloo::AlltoallOptions>(context);
      options->setInput(job->give, share * job->ranks);
      options->setOutput(job->get, share * job->ranks);
      once = [options](struct job *) { gloo::alltoall(*options); };
      break;
    }
    default: {
      auto options = std::make_shared<gloo::BarrierOptions>(context);
      once = [options](struct job *) { gloo::barrier(*options); };
    }
  }
  return job->get;
}

static void finish(struct job *) { once = nullptr; }

static void perform(struct job *job) { once(job); }

int main(int count, char **arguments) {
  go_with_parent();
  if (count != 7) {
    fprintf(stderr, "usage: gloo_collectives SOCKET OPERATION RANK RANKS STORE ADDRESS\n");
    return 1;
  }
  try {
    int rank = atoi(arguments[3]), ranks = atoi(arguments[4]);
    gloo::rendezvous::FileStore store(arguments[5]);
    auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(arguments[6]));
    context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    context->setTimeout(std::chrono::seconds(60));
    context->connectFullMesh(store, device);
    enum operation operation = operation_of(arguments[2]);
    serve(arguments[1], operation, rank, ranks, operation == ALL_REDUCE ? VARIANTS : 1);
  } catch (const std::exception &error) {
    fprintf(stderr, "Gloo failed: %s\n", error.what());
    return 1;
  }
  // Gloo's own threads still run: what they use must not be taken apart under them.
  fflush(nullptr);
  _exit(0);
}
