// Loads the two pixels of a row around a point together. GPUs look up a cache line for each address of a
// SIMD group, and points in no order have no line in common, so that fewer, wider loads are faster: three
// float32 channels of a row take 2.25 loads of 16 bytes instead of 6 of 4.

#include "taps.metal"

// The range that may be read, of images whose pixels are contiguous; empty for others.
template <typename T>
struct image_rows {
  const device T* begin;
  const device T* end;
};

// `strides` are those of images (N, H, W, C) of V channels.
template <typename T, int V>
image_rows<T> rows_of_images(
    const device T* x, const constant int64_t* strides, constant int* size, constant int* options) {
  image_rows<T> rows = {x, x};
  if (strides[3] == 1 && strides[2] == V && strides[1] >= V && strides[0] >= V) {
    long last_image = options[POINTS] / options[POINTS_PER_IMAGE] - 1;
    long last_row = last_image * long(strides[0]) + (size[HEIGHT] - 1) * long(strides[1]);
    rows.end = x + (last_row + size[WIDTH] * V);
  }
  return rows;
}

// Whether four pixels are inside, with all of the 16-byte vectors that their elements are part of.
template <typename T, int V>
bool has_neighbours(thread const image_rows<T>& rows, const device T* const thread* at) {
  constexpr int MARGIN = 16 / sizeof(T) - 1;
  bool inside = at[0] != nullptr && at[1] != nullptr && at[2] != nullptr && at[3] != nullptr;
  // The first row comes before the second.
  return inside && at[0] >= rows.begin + MARGIN && at[2] + (2 * V + MARGIN) <= rows.end;
}

template <typename T, int BYTES>
struct part_of_word {
  static T at(uint word, int) {
    return as_type<T>(word);
  }
};
template <typename T>
struct part_of_word<T, 2> {
  static T at(uint word, int i) {
    return as_type<T>(ushort(word >> (16 * i)));
  }
};

// V channels of the pixel at `from` and V of the next one, by loads of 16 bytes.
template <typename T, int V>
struct neighbours {
  enum : int { BYTES = 2 * V * sizeof(T), PACKS = (BYTES + 31 - sizeof(T)) / 16 };
  uint skip;
  uint words[4 * PACKS + 2];

  void load(const device T* from) {
    skip = uint(reinterpret_cast<ulong>(from) % 16);
    const device uint4* packs = reinterpret_cast<const device uint4*>(
        reinterpret_cast<const device uchar*>(from) - skip);
#pragma clang loop unroll(full)
    for (int i = 0; i < PACKS; i++) {
      uint4 next = uint4(0);
      if (i == 0 || skip + BYTES > 16 * i) {
        next = packs[i];
      }
      words[4 * i] = next.x;
      words[4 * i + 1] = next.y;
      words[4 * i + 2] = next.z;
      words[4 * i + 3] = next.w;
    }
    words[4 * PACKS] = words[4 * PACKS + 1] = 0;
  }

  // Shifts the words by 8, 4 and 2 bytes, by the bits of `skip`.
  template <int ALIGN>
  void take(thread pack<T, V, ALIGN>* values) {
    constexpr int WORDS = (BYTES + 3) / 4, PER_WORD = 4 / sizeof(T);
#pragma clang loop unroll(full)
    for (int i = 0; i < WORDS + 2 && i < 4 * PACKS; i++) {
      words[i] = skip & 8 ? words[i + 2] : words[i];
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < WORDS + 1; i++) {
      words[i] = skip & 4 ? words[i + 1] : words[i];
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < 2 * V; i++) {
      int at = i / PER_WORD;
      uint word = words[at];
      if (sizeof(T) == 2) {
        word = skip & 2 ? word >> 16 | words[at + 1] << 16 : word;
      }
      values[i / V].at[i % V] = part_of_word<T, sizeof(T)>::at(word, i % PER_WORD);
    }
  }
};
