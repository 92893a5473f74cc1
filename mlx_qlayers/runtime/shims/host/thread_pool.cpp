// Threadgroups spread over the cores: a few threads that sleep between lists of launches.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "scheduler.h"

// Nanoseconds of work for which it does not pay to wake another thread, or to share with one that is awake.
static const uint64_t kSerial = 60000, kSerialAwake = 6000;
static const uint64_t kEnd = ~0ull;
// Looks at a value before a waiting thread lets others have its core.
static const uint32_t kLooks = 1000;

struct Job {
  Item* items;
  uint64_t ready;  // the number of the launch that threads share now, from 1; or kEnd
};

static struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;  // one list at a time has the pool
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

// Returns the value that another thread changes, once it is not this one.
static uint64_t wait_while(const uint64_t* value, uint64_t is) {
  uint64_t now;
  for (uint32_t looks = 0; (now = __atomic_load_n(value, __ATOMIC_ACQUIRE)) == is; looks++) {
    if (looks >= kLooks) {
      sched_yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  return now;
}

// Runs threadgroups of a launch until none is left.
static bool take_part(Item* item) {
  if (__atomic_load_n(&item->next, __ATOMIC_RELAXED) >= item->count) return true;
  Launch* launch = item->launch;
  Worker* w = this_worker();
  uint64_t start = nanoseconds();
  w->checks = nullptr;
  if (!w->prepare(launch)) return false;
  for (;;) {
    uint64_t begin = __atomic_fetch_add(&item->next, item->chunk, __ATOMIC_RELAXED);
    if (begin >= item->count) break;
    uint64_t end = begin + item->chunk < item->count ? begin + item->chunk : item->count;
    for (uint64_t i = begin; i < end && !__atomic_load_n(&launch->fault, __ATOMIC_RELAXED); i++) {
      w->run_threadgroup(i);
    }
    __atomic_fetch_add(&item->done, end - begin, __ATOMIC_RELEASE);
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
    uint64_t at = 0;
    while ((at = wait_while(&job->ready, at)) != kEnd) take_part(&job->items[at - 1]);
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

// A forked child has none of its parent's threads.
extern "C" void qk_after_fork() { pool = Pool(); }

static void begin_sharing(Job* job, uint32_t helpers) {
  pthread_mutex_lock(&pool.mutex);
  grow(helpers);
  pool.job = job;
  pool.number++;
  pool.wanted = helpers;
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.mutex);
}

static void end_sharing(Job* job) {
  __atomic_store_n(&job->ready, kEnd, __ATOMIC_RELEASE);
  pthread_mutex_lock(&pool.mutex);
  pool.job = nullptr;
  while (pool.inside) pthread_cond_wait(&pool.idle, &pool.mutex);
  pthread_mutex_unlock(&pool.mutex);
  pthread_mutex_unlock(&pool.busy);
}

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
static const uint32_t kLanes = 16;

template <typename T>
static Floats loaded(const T* from) {
  typedef T Given __attribute__((ext_vector_type(kLanes), aligned(1)));
  if constexpr (!__is_same(T, __bf16)) return __builtin_convertvector(*(const Given*)from, Floats);
  Shorts bits;
  memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Where there is no instruction for it, clang would call a function for each element.
template <typename T>
static void store(T* to, Floats x) {
  typedef T Given __attribute__((ext_vector_type(kLanes), aligned(1)));
  if constexpr (!__is_same(T, __bf16)) {
    *(Given*)to = __builtin_convertvector(x, Given);
  } else {
    Words bits = (Words)x, quiet = bits | 0x400000, rounded = bits + 0x7fff + (bits >> 16 & 1);
    Shorts high = __builtin_convertvector((x == x ? rounded : quiet) >> 16, Shorts);
    memcpy(to, &high, sizeof high);
  }
}

// As MLX's operator: in float, and rounded before the weight as well.
template <typename T>
static void norm_rows(const Item* item) {
  const uint32_t width = item->width;
  const T* weight = (const T*)item->weight;
  for (uint32_t row = 0; row < item->rows; row++) {
    const T* x = (const T*)item->from + (uint64_t)row * width;
    T* y = (T*)item->to + (uint64_t)row * width;
    Floats sums = {};
    float sum = 0;
    uint32_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      Floats some = loaded(x + i);
      sums += some * some;
    }
#pragma clang loop vectorize(disable) unroll(disable)
    for (; i < width; i++) sum += (float)x[i] * (float)x[i];
    for (uint32_t j = 0; j < kLanes; j++) sum += sums[j];
    float factor = 1 / __builtin_sqrtf(sum / width + item->epsilon);
    for (i = 0; i + kLanes <= width; i += kLanes) {
      T scaled[kLanes];
      store(scaled, loaded(x + i) * factor);
      store(y + i, loaded(scaled) * loaded(weight + i));
    }
#pragma clang loop vectorize(disable) unroll(disable)
    for (; i < width; i++) y[i] = (T)((float)(T)((float)x[i] * factor) * (float)weight[i]);
  }
}

static void run_rows(const Item* item) {
  if (item->type == 1) return norm_rows<float>(item);
  if (item->type == 2) return norm_rows<_Float16>(item);
  if (item->type == 3) return norm_rows<__bf16>(item);
  for (uint64_t row = 0; row < item->rows; row++) {
    memcpy((char*)item->to + row * item->stride, (char*)item->from + row * item->width, item->width);
  }
}

// The threadgroups of a launch; more than 2^32 Python refuses first.
static uint64_t threadgroups(Launch* launch) {
  uint64_t count = 1;
  launch->fault = kNone;
  for (int d = 0; d < 3; d++) {
    count *= ((uint64_t)launch->grid[d] + launch->threadgroup[d] - 1) / launch->threadgroup[d];
    if (count >> 32) launch->fault = kFailed;
    if (launch->fault) return 0;
  }
  return count;
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

// Returns 0, or the number of the launch, from 1, whose fault says what went wrong.
extern "C" uint32_t qk_launch_list(Item* items, uint32_t length) {
  Job job = {items, 0};
  bool sharing = false, refused = false;
  uint32_t at = 0;
  for (bool ran = true; at < length; at++) {
    Item* item = &items[at];
    Launch* launch = item->launch;
    if (!launch) {
      run_rows(item);
      continue;
    }
    if (!(item->count = threadgroups(launch)) && !launch->fault) continue;
    uint32_t helpers = launch->workers > 1 ? launch->workers - 1 : 0;
    if (helpers >= item->count) helpers = item->count ? item->count - 1 : 0;
    // The last launch of this kind tells how much work it is; nobody knows that of the first.
    if (launch->work && launch->work < (length > 1 ? kSerialAwake : kSerial)) helpers = 0;
    launch->work = 0;
    if (helpers && !sharing && !refused) {
      refused = pthread_mutex_trylock(&pool.busy) != 0;
      sharing = !refused;
      if (sharing) begin_sharing(&job, launch->workers - 1);
    }
    item->chunk = item->count / (8 * (helpers + 1));
    item->chunk += !item->chunk;
    item->next = item->done = 0;
    if (sharing && helpers) __atomic_store_n(&job.ready, at + 1ull, __ATOMIC_RELEASE);
    ran = launch->fault ? false : take_part(item);
    for (uint64_t done; ran && (done = __atomic_load_n(&item->done, __ATOMIC_ACQUIRE)) < item->count;) {
      wait_while(&item->done, done);
    }
    if (!ran && !launch->fault) launch->fault = kFailed;
    if (launch->fault) break;
  }
  if (sharing) end_sharing(&job);
  return at < length ? at + 1 : 0;
}

// Returns 0, or 1 where the launch's fault says what went wrong.
extern "C" int qk_launch(Launch* launch) {
  if (!launch->checked) {
    Item item = {launch};
    return qk_launch_list(&item, 1) != 0;
  }
  uint64_t count = threadgroups(launch);
  if (count && !run_checked(launch, count) && !launch->fault) launch->fault = kFailed;
  return launch->fault != kNone;
}
