// AdamW with 8-bit states on a CPU, in one pass over memory: the operations of adamw8bit.py, in their order.
//
// Each is one that IEEE 754 rounds once, and the compiler may not contract two of them (-ffp-contract=off), so the bits
// are those of the reference. A block is updated in two loops, both of which compilers turn into vectors: the second
// one needs the largest values of the first. What it needs of them besides is in the first-level cache.

#include <cmath>
#include <cstdint>

#include "cpu_loops.h"

namespace {

constexpr int64_t kMostBlock = 4096, kChunk = 16384;  // elements

inline float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }  // to an integer, halves to even: |x| < 2^22
inline float clamped(float x, float least, float most) { return x < least ? least : x > most ? most : x; }  // NaN stays

struct Bf16 {
  uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Bf16& to) {  // to the nearest, halves to even
  const uint32_t bits = bits_of(x), nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = uint16_t(x == x ? nearest : 0x7fc0);
}

struct Settings {
  float beta1, rest1, beta2, rest2, eps, step_size, decay;
};

// One block of `width` elements. kCorrects: 8 further bits of each (bf16) parameter are in `correction`.
template <bool kCorrects, class Param, class Grad>
__attribute__((noinline)) void update(Param* __restrict param, const Grad* __restrict grad, int8_t* __restrict m_codes,
                                      float* __restrict m_scale, int8_t* __restrict r_codes, float* __restrict r_scale,
                                      int8_t* __restrict correction, const float* __restrict noise,
                                      int64_t width, const Settings s) {
  alignas(64) float ms[kMostBlock], rs[kMostBlock], ps[kCorrects ? kMostBlock : 1];
  if constexpr (kCorrects) {
    for (int64_t i = 0; i < width; ++i) {
      ps[i] = float_of((uint32_t(param[i].bits) << 16) + (uint32_t(int32_t(correction[i])) << 8));
    }
  }
  const float m_knee = *m_scale, r_knee = *r_scale;
  uint32_t m_top = 0, r_top = 0;  // bits of floats without a sign are in the order of their values, NaN above all
  for (int64_t i = 0; i < width; ++i) {
    const float g = wide(grad[i]);
    const float coded = float(m_codes[i]) * kFromSigned;
    const float m = coded * m_knee / (-std::fabs(coded) + 1.0f) * s.beta1 + g * s.rest1;
    const float level = (float(r_codes[i]) + 129.0f) * kFromUnsigned;
    const float r_before = level * r_knee / (-level + 1.0f);
    const float r = std::sqrt(r_before * r_before * s.beta2 + g * g * s.rest2);
    const float change = m / (r + s.eps) * s.step_size;
    if constexpr (kCorrects) {
      ps[i] = ps[i] * s.decay - change;
    } else {
      narrow(wide(param[i]) * s.decay - change, param[i]);
    }
    ms[i] = m;
    rs[i] = r;
    const uint32_t m_bits = bits_of(m) & 0x7fffffff, r_bits = bits_of(r) & 0x7fffffff;
    m_top = m_bits > m_top ? m_bits : m_top;
    r_top = r_bits > r_top ? r_bits : r_top;
  }
  if constexpr (kCorrects) {
    for (int64_t i = 0; i < width; ++i) {
      narrow(ps[i], param[i]);
      const int32_t rest = int32_t(bits_of(ps[i]) - (uint32_t(param[i].bits) << 16) + 128) >> 8;
      correction[i] = int8_t(rest > 127 ? 127 : rest);  // it is never below -128
    }
  }
  float m_next = float_of(m_top) * kKnee, r_next = float_of(r_top) * kKnee;
  m_next = m_next < kTiny ? kTiny : m_next;  // NaN stays
  r_next = r_next < kTiny ? kTiny : r_next;
  *m_scale = m_next;
  *r_scale = r_next;
  for (int64_t i = 0; i < width; ++i) {
    m_codes[i] = int8_t(int32_t(rounded(ms[i] / (std::fabs(ms[i]) + m_next) * float(kSigned))));
    const float level = std::floor(rs[i] / (rs[i] + r_next) * float(kUnsigned) + noise[i]);
    r_codes[i] = int8_t(int32_t(clamped(level - 129.0f, -128.0f, 127.0f)));
  }
}

// A row of the table: addresses, then numbers.
struct Piece {
  int64_t param, grad, m_codes, m_scales, r_codes, r_scales, correction, noise, numel, block, kind;
};

enum Kind : int64_t { kF32F32, kF32Bf16, kBf16F32, kBf16Bf16 };  // dtypes of parameter and gradient

template <bool kCorrects, class Param, class Grad>
void update_blocks(const Piece& piece, const Settings& s, int64_t first, int64_t last) {
  const float* noise = reinterpret_cast<const float*>(piece.noise);  // the same in each block
  for (int64_t block = first; block < last; ++block) {
    const int64_t start = block * piece.block, left = piece.numel - start;
    update<kCorrects>(reinterpret_cast<Param*>(piece.param) + start, reinterpret_cast<const Grad*>(piece.grad) + start,
                      reinterpret_cast<int8_t*>(piece.m_codes) + start, reinterpret_cast<float*>(piece.m_scales) + block,
                      reinterpret_cast<int8_t*>(piece.r_codes) + start, reinterpret_cast<float*>(piece.r_scales) + block,
                      reinterpret_cast<int8_t*>(piece.correction) + start, noise,
                      left < piece.block ? left : piece.block, s);
  }
}

void update_chunk(const Piece& piece, const Settings& s, int64_t first, int64_t last) {
  switch (piece.kind) {
    case kF32F32:
      return update_blocks<false, float, float>(piece, s, first, last);
    case kF32Bf16:
      return update_blocks<false, float, Bf16>(piece, s, first, last);
    case kBf16F32:
      return piece.correction ? update_blocks<true, Bf16, float>(piece, s, first, last)
                              : update_blocks<false, Bf16, float>(piece, s, first, last);
    case kBf16Bf16:
      return piece.correction ? update_blocks<true, Bf16, Bf16>(piece, s, first, last)
                              : update_blocks<false, Bf16, Bf16>(piece, s, first, last);
  }
}

int64_t divided_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

}  // namespace

// Update `num_pieces` pieces on at most `num_threads` threads.
extern "C" void zeroshard_adamw8bit(const Piece* pieces, const Settings* settings, int64_t num_pieces,
                                    int64_t num_threads) {
  const auto num_blocks = [](const Piece& piece) { return divided_up(piece.numel, piece.block); };
  const auto at_once = [](const Piece& piece) { return piece.block < kChunk ? kChunk / piece.block : 1; };  // blocks
  in_turns(
      num_pieces, num_threads,
      [&](int64_t i) { return divided_up(num_blocks(pieces[i]), at_once(pieces[i])); },
      [&](int64_t i, int64_t chunk) {
        const int64_t first = chunk * at_once(pieces[i]), last = first + at_once(pieces[i]), end = num_blocks(pieces[i]);
        update_chunk(pieces[i], settings[i], first, last < end ? last : end);
      });
}
