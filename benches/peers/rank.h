/* What every rank of a peer does: obeys the bench over a Unix socket, and times and checks operations.
 *
 * The bench sends "run SHARE WARM TIMED VARIANT SEED BARRIER" and gets "done TIMED WRONG" and, for each timed
 * operation, when it began and ended on the monotonic clock (two little-endian words of 64 bits). While it waits for
 * the bench a rank sleeps, so that it takes nothing from who is measured meanwhile. kolo's own ranks do the same, in Rust.
 *
 * A program that includes this defines `begin`, `perform`, `finish` and `meet`, and calls `serve`.
 */
#ifndef KOLO_BENCH_RANK_H
#define KOLO_BENCH_RANK_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum operation {
  ALL_REDUCE,
  ALL_GATHER,
  BROADCAST,
  REDUCE,
  GATHER,
  SCATTER,
  REDUCE_SCATTER,
  ALL_TO_ALL,
  SEND_RECEIVE,
  BARRIER,
  OPERATIONS
};

static const char *const operation_names[OPERATIONS] = {
    "all-reduce", "all-gather", "broadcast", "reduce", "gather", "scatter", "reduce-scatter", "all-to-all", "send-receive", "barrier"};

/* One series of operations. `give` is where this rank's values are, `get` where results come; they are the same memory
 * for all_reduce, reduce and broadcast. */
struct job {
  enum operation operation;
  int rank, ranks;
  size_t share; /* elements: of the whole buffer if all is combined or goes to one place, else of one rank's part */
  int variant;
  int root;
  float *give, *get;
};

/* What can be made ready before a series, and undone after it. `begin` says where results come, which may be `give`. */
static float *begin(struct job *job);
static void finish(struct job *job);
/* Does the operation once. Ends the process if that fails. */
static void perform(struct job *job);
/* A barrier that is not timed. */
static void meet(void);

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The values: small whole numbers, so that their sums are exact. */
static uint32_t offset_of(uint32_t rank, uint32_t round) { return (rank * 131 + round * 29) & 1023; }

static void fill(float *values, size_t first, size_t count, uint32_t rank, uint32_t round) {
  uint32_t offset = offset_of(rank, round);
  for (size_t i = 0; i < count; i++) values[i] = (float)(((uint32_t)(first + i) & 1023) + offset);
}

/* Counts what differs from `times` times the pattern plus `offset`. */
static uint64_t differ(const float *values, size_t first, size_t count, uint32_t times, uint32_t offset) {
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; i++)
    wrong += values[i] != (float)(((uint32_t)(first + i) & 1023) * times + offset);
  return wrong;
}

static size_t given(const struct job *job) {
  int parts = job->operation == REDUCE_SCATTER || job->operation == ALL_TO_ALL || job->operation == SCATTER;
  return parts ? job->share * job->ranks : job->share;
}

static size_t gotten(const struct job *job) {
  int parts = job->operation == ALL_GATHER || job->operation == ALL_TO_ALL || job->operation == GATHER;
  return parts ? job->share * job->ranks : job->share;
}

/* The other rank of a pair, which sends after it has received if it is the higher one. */
static int partner(const struct job *job) { return job->rank ^ 1; }

static void prepare(struct job *job, uint32_t round) {
  job->root = (int)(round % (uint32_t)job->ranks);
  int of_root = job->operation == BROADCAST || job->operation == SCATTER;
  if (of_root && job->rank != job->root) return;
  if (job->operation != BARRIER) fill(job->give, 0, given(job), job->rank, round);
}

static uint64_t check(const struct job *job, uint32_t round) {
  uint32_t sum = 0;
  uint64_t wrong = 0;
  size_t share = job->share;
  for (int rank = 0; rank < job->ranks; rank++) sum += offset_of(rank, round);
  switch (job->operation) {
    case ALL_REDUCE: return differ(job->get, 0, share, job->ranks, sum);
    case REDUCE: return job->rank == job->root ? differ(job->get, 0, share, job->ranks, sum) : 0;
    case REDUCE_SCATTER: return differ(job->get, job->rank * share, share, job->ranks, sum);
    case BROADCAST: return differ(job->get, 0, share, 1, offset_of(job->root, round));
    case SCATTER: return differ(job->get, job->rank * share, share, 1, offset_of(job->root, round));
    case SEND_RECEIVE: return differ(job->get, 0, share, 1, offset_of(partner(job), round));
    case GATHER:
      if (job->rank != job->root) return 0;
      /* fall through */
    case ALL_GATHER:
      for (int rank = 0; rank < job->ranks; rank++)
        wrong += differ(job->get + rank * share, 0, share, 1, offset_of(rank, round));
      return wrong;
    case ALL_TO_ALL:
      for (int rank = 0; rank < job->ranks; rank++)
        wrong += differ(job->get + rank * share, job->rank * share, share, 1, offset_of(rank, round));
      return wrong;
    default: return 0;
  }
}

static float *memory_of(size_t elements) {
  void *memory = NULL;
  if (posix_memalign(&memory, 4096, (elements ? elements : 1) * sizeof(float))) {
    fprintf(stderr, "no memory for %zu values\n", elements);
    exit(1);
  }
  memset(memory, 0, elements * sizeof(float));
  return (float *)memory;
}

static void run(struct job *job, unsigned warm, unsigned timed, uint32_t seed, int barrier, FILE *bench) {
  int in_place = job->operation == ALL_REDUCE || job->operation == REDUCE || job->operation == BROADCAST;
  job->give = memory_of(given(job));
  job->get = in_place ? job->give : memory_of(gotten(job));
  float *own = job->get;
  job->get = begin(job);
  meet();
  int64_t *times = (int64_t *)malloc(timed * 2 * sizeof(int64_t));
  uint64_t wrong = 0;
  for (unsigned i = 0; i < warm + timed; i++) {
    prepare(job, seed + i);
    if (barrier) meet();
    int64_t begun = now();
    perform(job);
    int64_t ended = now();
    if (i >= warm) {
      times[2 * (i - warm)] = begun;
      times[2 * (i - warm) + 1] = ended;
    }
    wrong += check(job, seed + i);
  }
  fprintf(bench, "done %u %llu\n", timed, (unsigned long long)wrong);
  fwrite(times, 2 * sizeof(int64_t), timed, bench);
  fflush(bench);
  free(times);
  finish(job);
  if (!in_place) free(own);
  free(job->give);
}

static enum operation operation_of(const char *name) {
  for (int i = 0; i < OPERATIONS; i++)
    if (!strcmp(name, operation_names[i])) return (enum operation)i;
  fprintf(stderr, "no operation is called %s\n", name);
  exit(1);
}

/* A process that goes with the one that started it. */
static void go_with_parent(void) { prctl(PR_SET_PDEATHSIG, SIGKILL); }

/* Obeys the bench until it ends the connection. */
static void serve(const char *path, enum operation operation, int rank, int ranks, int variants) {
  struct sockaddr_un address;
  memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
  int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0 || connect(descriptor, (struct sockaddr *)&address, sizeof(address))) {
    perror("the bench can't be reached");
    exit(1);
  }
  FILE *in = fdopen(descriptor, "r"), *out = fdopen(dup(descriptor), "w");
  fprintf(out, "ready %d %d\n", rank, variants);
  fflush(out);
  char line[256];
  while (fgets(line, sizeof(line), in)) {
    struct job job;
    memset(&job, 0, sizeof(job));
    unsigned warm, timed, seed;
    int barrier;
    job.operation = operation;
    job.rank = rank;
    job.ranks = ranks;
    if (sscanf(line, "run %zu %u %u %d %u %d", &job.share, &warm, &timed, &job.variant, &seed, &barrier) != 6) break;
    run(&job, warm, timed, seed, barrier, out);
  }
  fclose(out);
  fclose(in);
}

#endif
