// Threadgroups spread over the cores: a few threads that sleep between launches.
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "scheduler.h"

// Nanoseconds of work for which it does not pay to wake another thread.
static const uint64_t kSerial = 60000;

struct Job {
  Launch* launch;
  uint64_t next, count, chunk;  // what threads add beyond the end takes more than 32 bits
};

static struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;  // one launch at a time has the pool
  pthread_cond_t work = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
  Job* job = nullptr;
  uint64_t number = 0;
  uint32_t threads = 0, inside = 0, wanted = 0;
} pool;

static uint64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static bool run_job(Job* job) {
  Launch* launch = job->launch;
  Worker* w = this_worker();
  uint64_t start = nanoseconds();
  if (!w->prepare(launch)) return false;
  for (;;) {
    uint64_t begin = __atomic_fetch_add(&job->next, job->chunk, __ATOMIC_RELAXED);
    if (begin >= job->count || __atomic_load_n(&launch->fault, __ATOMIC_RELAXED)) break;
    uint64_t end = begin + job->chunk < job->count ? begin + job->chunk : job->count;
    for (uint64_t i = begin; i < end && !launch->fault; i++) w->run_threadgroup(i);
  }
  __atomic_fetch_add(&launch->work, nanoseconds() - start, __ATOMIC_RELAXED);
  return true;
}

static void* pool_thread(void*) {
  uint64_t seen = 0;
  pthread_mutex_lock(&pool.mutex);
  for (;;) {
    while (!pool.job || pool.number == seen || pool.inside >= pool.wanted) {
      pthread_cond_wait(&pool.work, &pool.mutex);
    }
    seen = pool.number;
    Job* job = pool.job;
    pool.inside++;
    pthread_mutex_unlock(&pool.mutex);
    run_job(job);
    pthread_mutex_lock(&pool.mutex);
    if (--pool.inside == 0) pthread_cond_signal(&pool.idle);
  }
  return nullptr;
}

static void grow(uint32_t threads) {
  while (pool.threads < threads) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, pool_thread, nullptr) != 0) return;
    pthread_detach(thread);
    pool.threads++;
  }
}

// What a benchmark asks for: launches, nanoseconds in them, and those that all threads worked.
extern "C" uint64_t qk_totals[3] = {};

// A forked child has none of its parent's threads.
extern "C" void qk_after_fork() { pool = Pool(); }

static bool run_shared(Job* job, uint32_t helpers) {
  pthread_mutex_lock(&pool.mutex);
  grow(helpers);
  pool.job = job;
  pool.number++;
  pool.wanted = helpers;
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.mutex);
  bool done = run_job(job);
  pthread_mutex_lock(&pool.mutex);
  pool.job = nullptr;
  while (pool.inside) pthread_cond_wait(&pool.idle, &pool.mutex);
  pthread_mutex_unlock(&pool.mutex);
  return done;
}

static bool run_unchecked(Launch* launch, uint32_t count) {
  this_worker()->checks = nullptr;
  uint32_t helpers = launch->workers > 1 ? launch->workers - 1 : 0;
  // The last launch of this kind tells how much work it is; nobody knows that of the first.
  if (launch->work && launch->work < kSerial) helpers = 0;
  launch->work = 0;
  if (helpers >= count) helpers = count - 1;
  uint32_t chunk = count / (8 * (helpers + 1));
  Job job = {launch, 0, count, chunk ? chunk : 1};
  if (!helpers || pthread_mutex_trylock(&pool.busy) != 0) return run_job(&job);
  bool done = run_shared(&job, helpers);
  pthread_mutex_unlock(&pool.busy);
  return done;
}

static bool run_checked(Launch* launch, uint32_t count) {
  Worker* w = this_worker();
  if (!w->prepare(launch)) return false;
  w->checks = checks_begin(launch, w);
  if (!w->checks) return false;
  for (uint32_t i = 0; i < count && !launch->fault; i++) w->run_threadgroup(i);
  checks_end(w->checks);
  w->checks = nullptr;
  return true;
}

// Returns 0, or 1 where the launch's fault says what went wrong.
extern "C" int qk_launch(Launch* launch) {
  launch->fault = kNone;
  uint64_t count = 1;
  for (int d = 0; d < 3; d++) {
    count *= ((uint64_t)launch->grid[d] + launch->threadgroup[d] - 1) / launch->threadgroup[d];
    if (count >> 32) launch->fault = kFailed;  // Python refuses such a grid first
    if (launch->fault) return 1;
  }
  if (count == 0) return 0;
  uint64_t start = nanoseconds();
  bool ran = launch->checked ? run_checked(launch, count) : run_unchecked(launch, count);
  uint64_t of_launch[] = {1, nanoseconds() - start, launch->work};
  for (int i = 0; i < 3; i++) __atomic_fetch_add(&qk_totals[i], of_launch[i], __ATOMIC_RELAXED);
  if (!ran && !launch->fault) launch->fault = kFailed;
  return launch->fault != kNone;
}
