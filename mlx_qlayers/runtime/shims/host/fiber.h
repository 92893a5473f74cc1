// Fibers: a stack and a switch between stacks, which costs a few nanoseconds.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

// Saves this stack in *from and continues on `to`; only the registers a callee must keep are moved.
extern "C" void qk_switch(void** from, void* to) __asm__("qk_switch");

#if defined(__x86_64__)
static const int kSavedWords = 6, kReturnWord = 6;
#elif defined(__aarch64__)
static const int kSavedWords = 20, kReturnWord = 11;
#else
#error "the host backend knows x86-64 and arm64"
#endif

static const size_t kStackBytes = 256 * 1024;
static const size_t kPageBytes = 16 * 1024;  // a guard of the largest page size in use
static const int kGuarded = 32;              // stacks above one guard

// Stacks one after another. Each guard costs two of the mappings of which a process has 65,530, so
// that a SIMD group shares one: the compiler bounds the frames, and its lanes run the same code.
struct Stacks {
  char* base;
  int count;

  bool reserve(int wanted) {
    if (wanted <= count) return true;
    release();
    void* p = mmap(nullptr, wanted * kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base = p == MAP_FAILED ? nullptr : (char*)p;
    count = base ? wanted : 0;
    for (int i = 0; i < count; i += kGuarded) mprotect(base + i * kStackBytes, kPageBytes, PROT_NONE);
    return base != nullptr;
  }

  void release() {
    if (base) munmap(base, count * kStackBytes);
    base = nullptr;
    count = 0;
  }

  // A stack that will start in `start`. Tops are staggered, or they would share cache sets.
  void* prepare(int i, void (*start)()) {
    uintptr_t top = (uintptr_t)base + (i + 1) * kStackBytes - 64 * (i % 61) - 64;
#if defined(__x86_64__)
    void** sp = (void**)top - 1 - kSavedWords - 1;  // as after a call: 8 past a multiple of 16
#else
    void** sp = (void**)top - kSavedWords;
#endif
    memset(sp, 0, kSavedWords * sizeof(void*));
    sp[kReturnWord] = (void*)start;
    return sp;
  }
};
