// Addresses of Python's arrays, put where a list of launches reads them: a call instead of a loop in Python, which
// behind a list finds little of what it needs in the caches.

#include "launch.h"

// What Python is asked for addresses by: PyList_GetItem, PyObject_GetBuffer, and so on.
struct Python {
  void* (*item)(void* list, intptr_t i);
  int (*get)(void* array, void* view, int flags);
  int (*contiguous)(const void* view, char order);
  void (*release)(void* view);
};

// The caller holds the interpreter's lock, which MLX gives back while it waits for an array's values. Returns whether
// all were row-contiguous, or -1 with Python's error set.
extern "C" int qk_place_arrays(
    const Python* python, void* arrays, const Place* places, uint32_t count, const uint64_t* starts) {
  constexpr int kStrided = 0x18;
  uint64_t view[32];  // a Py_buffer, which begins with the address
  uint64_t address = 0;
  for (uint32_t i = 0; i < count; i++) {
    const Place& place = places[i];
    if (!i || place.array != places[i - 1].array) {
      void* array = python->item(arrays, place.array);
      if (!array || python->get(array, view, kStrided)) return -1;
      address = view[0];
      bool contiguous = python->contiguous(view, 'C');
      python->release(view);
      if (!contiguous) return 0;
    }
    *place.word = address + starts[place.start] * place.row + place.behind;
  }
  return 1;
}
