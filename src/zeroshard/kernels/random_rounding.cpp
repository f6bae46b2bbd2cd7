// States of optimizers in fewer bits on a CPU, in one pass over memory: the operations of random_rounding.py, in their
// order. Each is one that IEEE 754 rounds once, so the bits are those of the reference.

#include <cmath>
#include <cstdint>

#include "cpu_loops.h"

namespace {

constexpr int64_t kPeriod = 16384, kMostBlock = 4096;  // elements: of the noise, and of a block

// A row of the table: addresses, the elements, and what they are kept as. `words` is of the first element.
struct Row {
  int64_t values, kept, scales, words, numel, kind;
};

enum Kind : int64_t { kBf16, kSignedCodes, kRootCodes, kMagnitudeCodes };

void round_to_bf16(const float* __restrict values, uint16_t* __restrict kept, const int32_t* __restrict words,
                   int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = bits_of(values[i]), magnitude = bits & 0x7fffffff;
    const uint32_t rounded = magnitude < 0x7f800000 ? bits + uint32_t(words[i]) : bits;  // Inf stays
    kept[i] = magnitude > 0x7f800000 ? 0x7fc0 : uint16_t(rounded >> 16);
  }
}

template <Kind kKind>
void encode(const float* __restrict values, int8_t* __restrict codes, float* __restrict scale,
            const int32_t* __restrict words, int64_t width) {
  alignas(64) float roots[kKind == kRootCodes ? kMostBlock : 1];
  uint32_t top = 0;  // bits of floats without a sign are in the order of their values, NaN above all
  for (int64_t i = 0; i < width; ++i) {
    float x = values[i];
    if constexpr (kKind == kRootCodes) x = roots[i] = std::sqrt(x);
    const uint32_t bits = bits_of(x) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float knee = float_of(top) * kKnee;
  *scale = knee = knee < kTiny ? kTiny : knee;  // NaN stays
  for (int64_t i = 0; i < width; ++i) {
    const float x = kKind == kRootCodes ? roots[i] : values[i], up = float(words[i]) * 0x1p-16f;
    float level;
    if constexpr (kKind == kSignedCodes) {
      level = std::floor(x / (std::fabs(x) + knee) * float(kSigned) + up);
      level = level < -127.0f ? -127.0f : level;
    } else {
      level = std::floor(x / (x + knee) * float(kUnsigned) + up) - 129.0f;
      level = level < -128.0f ? -128.0f : level;
    }
    codes[i] = int8_t(int32_t(level > 127.0f ? 127.0f : level));
  }
}

template <Kind kKind>
void decode(float* __restrict values, const int8_t* __restrict codes, float knee, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    if constexpr (kKind == kSignedCodes) {
      const float coded = float(codes[i]) * kFromSigned;
      values[i] = coded * knee / (-std::fabs(coded) + 1.0f);
    } else {
      const float level = (float(codes[i]) + 129.0f) * kFromUnsigned, x = level * knee / (-level + 1.0f);
      values[i] = kKind == kRootCodes ? x * x : x;
    }
  }
}

template <Kind kKind>
void convert_blocks(const Row& row, int64_t block, bool encodes, int64_t start, int64_t stop) {
  float* values = reinterpret_cast<float*>(row.values);
  int8_t* codes = reinterpret_cast<int8_t*>(row.kept);
  float* scales = reinterpret_cast<float*>(row.scales);
  const int32_t* words = reinterpret_cast<const int32_t*>(row.words) - start;  // a part is a period, or the rest of one
  for (int64_t first = start; first < stop; first += block) {
    const int64_t width = stop - first < block ? stop - first : block;
    if (encodes) {
      encode<kKind>(values + first, codes + first, scales + first / block, words + first, width);
    } else {
      decode<kKind>(values + first, codes + first, scales[first / block], width);
    }
  }
}

void convert(const Row& row, int64_t block, bool encodes, int64_t start, int64_t stop) {
  float* values = reinterpret_cast<float*>(row.values) + start;
  uint16_t* kept = reinterpret_cast<uint16_t*>(row.kept) + start;
  switch (row.kind) {
    case kBf16:
      if (encodes) return round_to_bf16(values, kept, reinterpret_cast<const int32_t*>(row.words), stop - start);
      for (int64_t i = 0; i < stop - start; ++i) values[i] = float_of(uint32_t(kept[i]) << 16);
      return;
    case kSignedCodes:
      return convert_blocks<kSignedCodes>(row, block, encodes, start, stop);
    case kRootCodes:
      return convert_blocks<kRootCodes>(row, block, encodes, start, stop);
    case kMagnitudeCodes:
      return convert_blocks<kMagnitudeCodes>(row, block, encodes, start, stop);
  }
}

}  // namespace

// Encode or decode the rows on at most `num_threads` threads, a period of the noise at a time.
extern "C" void zeroshard_convert_states(const Row* rows, int64_t num_rows, int64_t block, int64_t encodes,
                                         int64_t num_threads) {
  in_turns(
      num_rows, num_threads, [&](int64_t i) { return (rows[i].numel + kPeriod - 1) / kPeriod; },
      [&](int64_t i, int64_t period) {
        const int64_t start = period * kPeriod, stop = start + kPeriod;
        convert(rows[i], block, encodes != 0, start, stop < rows[i].numel ? stop : rows[i].numel);
      });
}
