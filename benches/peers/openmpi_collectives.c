/* One rank of Open MPI, for kolo-bench. Started by mpirun: openmpi_collectives SOCKET OPERATION */
#include <mpi.h>

#include "rank.h"

static void meet(void) { MPI_Barrier(MPI_COMM_WORLD); }

static float *begin(struct job *job) { return job->get; }
static void finish(struct job *job) { (void)job; }

/* MPI's default error handler ends all ranks. */
static void perform(struct job *job) {
  int share = (int)job->share, is_root = job->rank == job->root;
  switch (job->operation) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, job->get, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_GATHER: MPI_Allgather(job->give, share, MPI_FLOAT, job->get, share, MPI_FLOAT, MPI_COMM_WORLD); break;
    case BROADCAST: MPI_Bcast(job->get, share, MPI_FLOAT, job->root, MPI_COMM_WORLD); break;
    case REDUCE:
      MPI_Reduce(is_root ? MPI_IN_PLACE : job->get, is_root ? job->get : NULL, share, MPI_FLOAT, MPI_SUM, job->root, MPI_COMM_WORLD);
      break;
    case GATHER: MPI_Gather(job->give, share, MPI_FLOAT, job->get, share, MPI_FLOAT, job->root, MPI_COMM_WORLD); break;
    case SCATTER: MPI_Scatter(job->give, share, MPI_FLOAT, job->get, share, MPI_FLOAT, job->root, MPI_COMM_WORLD); break;
    case SEND_RECEIVE:
      if (job->rank < partner(job)) MPI_Send(job->give, share, MPI_FLOAT, partner(job), 0, MPI_COMM_WORLD);
      MPI_Recv(job->get, share, MPI_FLOAT, partner(job), 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      if (job->rank > partner(job)) MPI_Send(job->give, share, MPI_FLOAT, partner(job), 0, MPI_COMM_WORLD);
      break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(job->give, job->get, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case ALL_TO_ALL: MPI_Alltoall(job->give, share, MPI_FLOAT, job->get, share, MPI_FLOAT, MPI_COMM_WORLD); break;
    default: MPI_Barrier(MPI_COMM_WORLD);
  }
}

int main(int count, char **arguments) {
  go_with_parent();
  int rank, ranks;
  if (count != 3) {
    fprintf(stderr, "usage: openmpi_collectives SOCKET OPERATION\n");
    return 1;
  }
  MPI_Init(&count, &arguments);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  serve(arguments[1], operation_of(arguments[2]), rank, ranks, 1);
  MPI_Finalize();
  return 0;
}
